package apply

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/fault"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/test/tree"
)

// A disk that is full, broken or read-only fails one durable operation, or that
// one and every later one, until somebody puts it right. The box ends on
// exactly one build, what is told says whose fault it was, and the next try
// succeeds.
func TestDiskErrors(t *testing.T) {
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			c := &crashes{t: t, s: s, dir: tree.InMemory(t)}
			base := newBoxOf(t, s.component)
			s.prepare(base)
			counter := &fault.Points{}
			counting, gone := c.fork(base, counter, s.bad)
			_ = s.act(counting)
			gone()
			for _, e := range []struct {
				errno   unix.Errno
				word    outcome.Word
				lasting bool
			}{{unix.ENOSPC, outcome.NoSpace, false}, {unix.ENOSPC, outcome.NoSpace, true}, {unix.EIO, outcome.IO, false}, {unix.EROFS, outcome.IO, true}} {
				step := 1
				if testing.Short() {
					step = 11
				}
				for n := 1; n <= counter.Count(); n += step {
					c.diskError(base, n, e.errno, e.word, e.lasting)
				}
			}
			t.Logf("SHOW disk errors, %s: %d of %d end on exactly one build, and the next try succeeds", s.name, c.first-c.failed, c.first)
		})
	}
}

func (c *crashes) diskError(base *testbox, n int, errno unix.Errno, word outcome.Word, lasting bool) {
	points := &fault.Points{}
	where, broken, at := "", false, 0
	points.Refuse = func(op, object string) error {
		at++
		if strings.HasPrefix(op, "manager: ") || at < n || at > n && !lasting {
			return nil
		}
		if where == "" {
			where = op + " " + filepath.Base(object)
		}
		broken = true
		return &os.PathError{Op: op, Path: object, Err: errno}
	}
	b, gone := c.fork(base, points, c.s.bad)
	defer gone()
	target := b.candidate()
	_ = c.s.act(b)
	if !broken {
		return // a call of the manager's
	}
	c.first++
	what := fmt.Sprintf("%s at %d, %s, lasting %v", errno, n, where, lasting)
	c.judge(b.instant(), "%s", what)
	b.disk.Fault.Refuse = nil
	wasOpen := b.state.Open()
	if r := record.Optional[contract.Result](b.state, layout.Result); !wasOpen && r != nil && string(r.Version) == target && !c.s.heal {
		blamed := r.Word() == word || c.s.bad && r.Word() == outcome.Gate
		if r.Outcome != outcome.Applied && !blamed || r.Terminal("") && !(c.s.bad && r.Word() == outcome.Gate) {
			c.judge(fmt.Errorf("it ended as %s: %s", r.Outcome, r.Reason), "%s", what)
		}
	}
	committed := !c.s.heal && b.committed(target)
	if wasOpen { // as OnFailure= does
		err := b.revive(c.s, false)
		if err == nil {
			err = b.after(c.s.old, target, committed)
		}
		c.judge(err, "%s, recovered", what)
	}
	if _, err := b.oneBuild(); err != nil && (wasOpen || !c.s.heal) { // heal comes again
		c.judge(err, "%s, recovered", what)
		return
	}
	// The disk is right again, and fetch asks again.
	want := c.s.old
	if !c.s.bad {
		want = target
	}
	if !c.s.heal {
		b.must(marker.Raise(b.state.Path(layout.Staged)))
	}
	_ = c.s.act(b)
	version, err := b.oneBuild()
	if err == nil && version != want {
		err = fmt.Errorf("the next try ends on %q", version)
	}
	c.judge(err, "%s, again", what)
}
