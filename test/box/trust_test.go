package box

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// Keys are rotated, and a pointer expires, on a box that runs by itself: in its
// sandboxes, with its three users.
func TestTrustMovesAndPointersExpire(t *testing.T) {
	f := enrolled(t, "quick=stable")
	ctx := t.Context()
	sluice := func(args ...string) string {
		t.Helper()
		return must[string](t)(f.Sluice(ctx, args...))
	}
	bundle := func(version string) string {
		t.Helper()
		return must[string](t)(f.Bundle(ctx, "quick-"+version, sleeper("quick", version, "1s")))
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bundle("1"))), outcome.Applied))
	life := must[string](t)(f.Exec(ctx, "systemctl", "show", "-p", "InvocationID", "quick.service"))

	const draft, alice = Operator + "/trust.json", Operator + "/alice"
	sluice("keygen", "-o", alice)
	sluice("trust", "add", alice+".pub", "-store", f.Store, "-o", draft, "-expires", "365d")
	sluice("trust", "remove", Operator+"/key.pub", "-store", f.Store, "-o", draft)
	sluice("trust", "sign", draft, "-key", Operator+"/key.key", "-yes")
	sluice("trust", "sign", draft, "-key", alice+".key", "-yes")
	sluice("trust", "publish", draft, "-store", f.Store, "-key", alice+".key", "-yes")
	for _, c := range []contract.Component{"quick", layout.Pipeline} {
		err := Until(ctx, fmt.Sprintf("the trust of %s to move", c), RollTime, func() (bool, error) {
			set, err := f.State(c).Trust()
			return set.Number == 2, err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if now := must[string](t)(f.Exec(ctx, "systemctl", "show", "-p", "InvocationID", "quick.service")); now != life {
		t.Error("the service was restarted")
	}
	err := Until(ctx, "what was handed on to be gone", RollTime, func() (bool, error) {
		left, err := filepath.Glob(filepath.Join(f.State("quick").Path(layout.Incoming), "trust-*"))
		return len(left) == 0, err
	})
	if err != nil {
		t.Error(err)
	}

	promote := func(version string, args ...string) contract.Pointer {
		t.Helper()
		return must[contract.Pointer](t)(f.pointer(ctx, append([]string{"update", "-store", f.Store, "-key", alice + ".key", "-file", bundle(version), "-yes", "-json"}, args...)...))
	}
	must[contract.Result](t)(f.Ended(ctx, promote("2"), outcome.Applied))

	sluice("hold")
	p := promote("3", "-expires", "1s")
	time.Sleep(time.Until(p.Payload.ExpiresAt.Time)) // it is over
	sluice("resume")
	if r := must[contract.Result](t)(f.Ended(ctx, p, outcome.Deferred)); r.Word() != outcome.Expired {
		t.Errorf("%+v", r)
	}
	if f.running("quick") != "2" {
		t.Errorf("runs %s", f.running("quick"))
	}
	sluice("refresh", "quick", "-store", f.Store, "-key", alice+".key", "-expires", "14d")
	must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied)) // at once: the back-off is not waited for
	seen, _, err := record.Load[contract.Seen](f.State("quick"), layout.Seen)
	if w := seen.Channels["stable"]; err != nil || w.Trust != 2 || !w.PromotedAt.Equal(p.PromotedAt.Time) {
		t.Errorf("%+v, %v", w, err)
	}
}
