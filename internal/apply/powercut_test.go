package apply

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"sluice/internal/fault"
	"sluice/test/cut"
)

// How many of the points TestPowerCut cuts at; `make powercut` cuts at every
// one.
var (
	cutExt4 = flag.Int("cut-ext4", 4, "cut the power at every nth point, on ext4")
	cutXFS  = flag.Int("cut-xfs", 12, "cut the power at every nth point, on xfs")
)

// A trio is a box's disk: /opt, /etc and /data are three filesystems. On one,
// a folder's fsync that is missing only loses the end of what was done, and
// looks like a kill that came earlier.
type trio struct {
	t     *testing.T
	root  string
	disks []*cut.Disk
}

func newTrio(t *testing.T, kind string) *trio {
	r := &trio{t: t, root: t.TempDir()}
	for _, name := range []string{"opt", "etc", "data"} {
		r.disks = append(r.disks, cut.New(t, kind, filepath.Join(r.root, name)))
	}
	return r
}

func (r *trio) each(do func(*cut.Disk) error) {
	r.t.Helper()
	for _, d := range r.disks {
		if err := do(d); err != nil {
			r.t.Fatal(err)
		}
	}
}

// lay puts a copy of a box on the disks, durably.
func (r *trio) lay(b *testbox, points *fault.Points, bad bool) *testbox {
	r.t.Helper()
	r.each((*cut.Disk).Clear)
	b.must(os.RemoveAll(filepath.Join(r.root, "usr"))) // it is on none of them
	c := b.fork(r.root, points, bad)
	r.each((*cut.Disk).Sync)
	return c
}

// boot is the box after the cut: what is on the disks, and a manager that has
// just started.
func (r *trio) boot(b *testbox) *testbox {
	r.t.Helper()
	r.each((*cut.Disk).Revive)
	return b.reborn()
}

// The power is cut at the durable operations and the manager's calls of each
// scenario, on all three filesystems at once, and the box boots and recovers.
// Where the recovery of a kill has ended, it is cut too: what that life only
// saw done has to be durable as well.
func TestPowerCut(t *testing.T) {
	for kind, every := range map[string]*int{"ext4": cutExt4, "xfs": cutXFS} {
		for _, s := range scenarios {
			t.Run(kind+" "+s.name, func(t *testing.T) {
				t.Parallel()
				if testing.Short() {
					t.Skip("needs root and loop devices: `make test` has them")
				}
				base := newBoxOf(t, s.component)
				s.prepare(base)
				target := base.candidate()
				r := newTrio(t, kind)
				cuts, failed := 0, 0
				judge := func(err error, n int, where string) {
					if cuts++; err != nil {
						if failed++; failed <= 5 {
							t.Errorf("%d, %s: %v", n, where, err)
						}
					}
				}
				total := countPoints(r.lay(base, &fault.Points{}, s.bad), s)
				for n := 1; n <= total; n += *every {
					where := ""
					points := &fault.Points{At: n, Seen: func(i int, op, object string) {
						if i == n {
							where = op + " " + filepath.Base(object)
							r.each((*cut.Disk).Cut)
						}
					}}
					dead := r.lay(base, points, s.bad)
					_ = s.act(dead)
					revived := r.boot(dead)
					committed := !s.heal && revived.committed(target)
					err := revived.instant()
					if err == nil {
						err = revived.revive(s, true)
					}
					if err == nil {
						err = revived.after(s.old, target, committed)
					}
					judge(err, n, where)

					killed := r.lay(base, &fault.Points{At: n}, s.bad)
					_ = s.act(killed)
					committed = !s.heal && killed.committed(target)
					again := killed.reborn()
					err = again.revive(s, false)
					r.each((*cut.Disk).Cut)
					cutAfter := r.boot(again)
					cutAfter.manager.PowerCycle()
					if err == nil {
						err = errors.Join(cutAfter.applier().Recover(context.Background(), true), cutAfter.after(s.old, target, committed))
					}
					judge(err, n, where+", recovered, and then cut")
				}
				t.Logf("SHOW power cut, %s, %s: %d of %d end on exactly one build", kind, s.name, cuts-failed, cuts)
			})
		}
	}
}

// countPoints counts the points of a scenario.
func countPoints(b *testbox, s scenario) int {
	_ = s.act(b)
	return b.disk.Fault.Count()
}
