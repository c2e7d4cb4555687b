package layout

import (
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"strconv"
)

// UID returns the user id that a user's files have. On a tree that is not the
// running system every actor is whoever runs the programs.
func (r Root) UID(name string) (int, error) {
	if !r.Live() {
		return os.Geteuid(), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return 0, fmt.Errorf("user %q is not on this box: run systemd-sysusers, or enroll the box again: %w", name, err)
	}
	return strconv.Atoi(u.Uid)
}

func (r Root) gid(name string) (int, error) {
	if !r.Live() {
		return os.Getegid(), nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, fmt.Errorf("group %q is not on this box: run systemd-sysusers, or enroll the box again: %w", name, err)
	}
	return strconv.Atoi(g.Gid)
}

// FileMode returns the mode of a row as Go writes it.
func (r Row) FileMode() fs.FileMode {
	m := fs.FileMode(r.Mode & 0o777)
	if r.Mode&0o2000 != 0 {
		m |= fs.ModeSetgid
	}
	return m
}

// Folders returns the folders that a component has on a box, parents first,
// without those that systemd makes in /run.
func Folders() []Row {
	var out []Row
	for _, row := range Table {
		if row.Kind == Folder && row.Place[:5] != "/run/" {
			out = append(out, row)
		}
	}
	return out
}

// Owner returns the user and group id that what stands at a row's place has;
// -1, for leave as it is, on a tree that is not the running system.
func (r Root) Owner(row Row) (uid, gid int, err error) {
	if !r.Live() {
		return -1, -1, nil
	}
	if uid, err = r.UID(row.Owner); err != nil {
		return 0, 0, err
	}
	gid, err = r.gid(row.Group)
	return uid, gid, err
}
