// Package unit checks what a build's unit files and its manifest say of each
// other. It reads no disk and speaks to no manager.
package unit

import (
	"bytes"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/coreos/go-systemd/v22/unit"

	"sluice/internal/contract"
)

// MaxFile is the most bytes that a unit file may have.
const MaxFile = 1 << 20

// Options returns all values of one directive of a unit file, in order.
func Options(opts []*unit.UnitOption, section, name string) []string {
	var out []string
	for _, o := range opts {
		if o.Section == section && o.Name == name {
			out = append(out, o.Value)
		}
	}
	return out
}

// Parse reads a unit file.
func Parse(data []byte) ([]*unit.UnitOption, error) {
	return unit.DeserializeOptions(bytes.NewReader(data))
}

// Install is the [Install] section of a unit file, as one text to compare:
// what enabling the unit makes of it.
func Install(data []byte) string {
	opts, err := Parse(data)
	if err != nil {
		return ""
	}
	var lines []string
	for _, o := range section(opts, "Install") {
		lines = append(lines, o.Name+"="+o.Value)
	}
	return strings.Join(lines, "\n")
}

// Oneshot reports whether a service does one thing and ends.
func Oneshot(opts []*unit.UnitOption) bool {
	t := Options(opts, "Service", "Type")
	return len(t) > 0 && t[len(t)-1] == "oneshot"
}

// Armed reports whether arming starts a unit of this name, and not only
// enables it. A service never is: apply runs inside one.
func Armed(name string) bool {
	switch path.Ext(name) {
	case ".timer", ".path", ".socket":
		return true
	}
	return false
}

// Check says what is wrong with the units of a build. read returns a file of
// the bundle.
func Check(m contract.Manifest, read func(path string) ([]byte, error)) error {
	files := map[string][]*unit.UnitOption{}
	for _, name := range m.UnitFiles() {
		data, err := read(contract.UnitsFolder + name)
		if err != nil {
			return err
		}
		if files[name], err = Parse(data); err != nil {
			return fmt.Errorf("unit file %q: %w", name, err)
		}
		if err := checkBonds(m, name, files[name]); err != nil {
			return err
		}
	}
	for _, u := range m.Units.Quiesce {
		if opts, ok := files[contract.UnitFile(u)]; ok && strings.HasSuffix(u, ".service") && !Oneshot(opts) {
			return fmt.Errorf("quiesce lists %q, which is no oneshot: a long-running service belongs in restart", u)
		}
	}
	for _, u := range m.Units.Enable {
		opts, ok := files[contract.UnitFile(u)]
		if !ok {
			continue // said when it is applied: the manager may know it
		}
		if !slices.ContainsFunc(section(opts, "Install"), func(o *unit.UnitOption) bool { return o.Name != "Also" && o.Name != "DefaultInstance" }) {
			return fmt.Errorf("enable lists %q, whose [Install] section makes no link, so there is nothing to enable: list it in inert", u)
		}
		for _, also := range strings.Fields(strings.Join(Options(opts, "Install", "Also"), " ")) {
			// What is enabled by the way would not be disabled by it.
			if !slices.Contains(m.Units.Enable, also) {
				return fmt.Errorf("unit file %q has Also=%s, which enable does not list: what is enabled by the way is never disabled", u, also)
			}
		}
		restarted := slices.ContainsFunc(m.Units.Restart, func(r contract.Restart) bool { return r.Unit == u })
		if strings.HasSuffix(u, ".service") && !restarted && !Oneshot(opts) {
			return fmt.Errorf("enable lists %q, a long-running service that restart does not list: nothing would ever start it", u)
		}
	}
	for name, opts := range files {
		if err := checkPair(m, name, opts); err != nil {
			return err
		}
	}
	return nil
}

func section(opts []*unit.UnitOption, name string) (out []*unit.UnitOption) {
	for _, o := range opts {
		if o.Section == name {
			out = append(out, o)
		}
	}
	return out
}

// checkBonds keeps the updater and the updated from stopping each other.
func checkBonds(m contract.Manifest, name string, opts []*unit.UnitOption) error {
	for _, directive := range []string{"Requires", "Requisite", "BindsTo", "PartOf", "Upholds"} {
		for _, v := range Options(opts, "Unit", directive) {
			for _, u := range strings.Fields(v) {
				if strings.HasPrefix(u, "sluice-") != (m.Component == "sluice") && strings.HasPrefix(u, "sluice-") {
					return fmt.Errorf("unit file %q: %s=%s would let the updater and the updated stop each other", name, directive, u)
				}
			}
		}
	}
	return nil
}

// checkPair finds a trigger without the unit it starts, which systemd-analyze
// verify (252) lets pass.
func checkPair(m contract.Manifest, name string, opts []*unit.UnitOption) error {
	kind, directive := "", ""
	switch path.Ext(name) {
	case ".path":
		kind, directive = "Path", "Unit"
	case ".timer":
		kind, directive = "Timer", "Unit"
	case ".socket":
		kind, directive = "Socket", "Service"
	default:
		return nil
	}
	target := strings.TrimSuffix(name, path.Ext(name)) + ".service"
	if set := Options(opts, kind, directive); len(set) > 0 {
		target = set[len(set)-1]
	} else if accept := Options(opts, kind, "Accept"); len(accept) > 0 && accept[len(accept)-1] == "yes" {
		target = strings.TrimSuffix(name, path.Ext(name)) + "@.service"
	}
	if !strings.Contains(target, "%") && !m.Ships(target) {
		return fmt.Errorf("unit file %q starts %q, which the bundle does not have", name, target)
	}
	return nil
}
