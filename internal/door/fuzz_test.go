package door

import (
	"net/http"
	"strings"
	"testing"

	"sluice/internal/contract"
)

// Whatever is asked for, what is let through is a key of the store, of one tree, and
// none of the door's own.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"/control/serial", "/control/serial?wait=60s", "/fleets/acme/control/trust/12.json", "/bootstrap/edge/1/x", "/status/boxes/box-1.json", "/control/system/edge/stable.v2.json", "/..", "/%2e", "//"} {
		f.Add("GET", seed, "", int64(0))
	}
	f.Add("PUT", "/status/boxes/box-1.json", "", int64(2))
	f.Add("GET", "/bootstrap/edge/1/x", "bytes=5-", int64(0))
	f.Fuzz(func(t *testing.T, method, target, ranges string, length int64) {
		r := &http.Request{Method: method, RequestURI: target, Header: http.Header{}, ContentLength: length}
		if ranges != "" {
			r.Header.Set("Range", ranges)
		}
		a, err := parse(r)
		if err != nil {
			return
		}
		path, _, _ := strings.Cut(target, "?")
		whole := "/" + a.key
		if a.fleet != "" {
			whole = "/" + contract.FleetPrefix(a.fleet) + a.key
		}
		if contract.KeyForm(a.key) != nil || whole != path || strings.HasPrefix(a.key, "control/door") || strings.HasPrefix(a.key, "fleets/") {
			t.Errorf("%q became %+v", target, a)
		}
		if a.kind == heartbeat != (method == http.MethodPut) || a.offset < -1 || a.size > contract.MaxHeartbeat {
			t.Errorf("%s %q: %+v", method, target, a)
		}
	})
}
