package contract

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Limits of a bundle.
const (
	MaxManifest = 1 << 20   // bytes of a manifest
	MaxFiles    = 4096      // files of a bundle
	MaxUnpacked = 512 << 20 // bytes that a bundle unpacks to
	MaxPathLen  = 255       // bytes of a path in a bundle
	MaxGate     = Duration(15 * time.Minute)
)

// ManifestName is the first entry of every bundle and stands in every set.
const ManifestName = "manifest.json"

// Folders of a bundle whose files have another place on the box.
const (
	UnitsFolder    = "units/"
	SysusersFolder = "sysusers.d/"
	TmpfilesFolder = "tmpfiles.d/"
	// Only in a set before-sluice, which a box makes for itself: what stands
	// below is a copy of the file at that absolute path.
	AdoptedFolder = "adopted/"
)

// Default windows of a gate.
const (
	DefaultPassWithin = Duration(20 * time.Second)
	DefaultSoak       = Duration(15 * time.Second)
)

// A Manifest is a build: every file of it, and what is to become of them.
type Manifest struct {
	Schema         Step                  `json:"schema"`
	Component      Component             `json:"component"`
	Version        Version               `json:"version"`
	Platform       Platform              `json:"platform"`
	Files          []File                `json:"files"`
	VersionCommand []string              `json:"version_command,omitzero"`
	VersionText    string                `json:"version_text,omitzero"`
	Units          Units                 `json:"units,omitzero"`
	Gate           Gate                  `json:"gate,omitzero"`
	Needs          map[Component]Version `json:"needs,omitzero"`
	Reads          map[Ladder]Step       `json:"reads,omitzero"` // component sluice: the record versions it reads
}

// A File is one file of a build.
type File struct {
	Path   string `json:"path"`
	Mode   Mode   `json:"mode"`
	Size   int64  `json:"size"`
	SHA256 Digest `json:"sha256"`
}

// A Mode is permission bits, written in octal with a leading zero.
type Mode uint32

// UnmarshalText reads a mode that gives nobody but the owner the right to
// write, and has no set-id bits.
func (m *Mode) UnmarshalText(b []byte) error {
	v, err := strconv.ParseUint(string(b), 8, 32)
	if err != nil || len(b) != 4 || b[0] != '0' {
		return fmt.Errorf("%q is no mode: it must be like 0644", clip(string(b)))
	}
	if v&0o022 != 0 || v&0o400 == 0 {
		return fmt.Errorf("mode %s: only the owner may write, and he must be able to read", b)
	}
	*m = Mode(v)
	return nil
}

// MarshalText writes a mode.
func (m Mode) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%04o", uint32(m)), nil }

// Units says what becomes of a build's units.
type Units struct {
	Enable  []string  `json:"enable,omitzero"` // armed after the gate
	Inert   []string  `json:"inert,omitzero"`  // installed, not armed
	Restart []Restart `json:"restart,omitzero"`
	Quiesce []string  `json:"quiesce,omitzero"` // stopped before anything changes
}

// A Restart is a unit that is restarted when one of its inputs changed.
type Restart struct {
	Unit   string   `json:"unit"`
	Inputs []string `json:"inputs,omitzero"` // all files, if left out
}

// A Gate is what must become true after the restart, and stay true.
type Gate struct {
	PassWithin Duration `json:"pass_within,omitzero"`
	Soak       Duration `json:"soak,omitzero"`
	Probes     []Probe  `json:"probes,omitzero"`
}

// Windows returns the two windows, never shorter than the box's floor.
func (g Gate) Windows(minSoak time.Duration) (pass, soak time.Duration) {
	pass, soak = time.Duration(g.PassWithin), time.Duration(g.Soak)
	if pass == 0 {
		pass = time.Duration(DefaultPassWithin)
	}
	if soak == 0 {
		soak = time.Duration(DefaultSoak)
	}
	return pass, max(soak, minSoak)
}

// A Probe is one question to a service: exactly one of TCP, HTTP and Exec.
type Probe struct {
	TCP    string   `json:"tcp,omitzero"`
	HTTP   string   `json:"http,omitzero"`
	Status int      `json:"status,omitzero"` // of HTTP; any, if left out
	Exec   []string `json:"exec,omitzero"`
}

func (p Probe) String() string {
	switch {
	case p.TCP != "":
		return "tcp " + p.TCP
	case p.HTTP != "":
		return "http " + p.HTTP
	}
	return "exec " + strings.Join(p.Exec, " ")
}

// DecodeManifest reads a manifest and checks its rules.
func (s Speaks) DecodeManifest(data []byte) (Manifest, error) {
	var m Manifest
	if err := s.decode(ManifestLadder, data, MaxManifest, &m, "schema"); err != nil {
		return m, err
	}
	if err := m.Check(); err != nil {
		return m, fmt.Errorf("reading the manifest of %s %s: %w", m.Component, m.Version, err)
	}
	return m, nil
}

// Encode writes a manifest.
func (m Manifest) Encode() []byte { m.Schema = lowest(m).step; return encode(m) }

// File returns the file at path.
func (m Manifest) File(path string) (File, bool) {
	i := slices.IndexFunc(m.Files, func(f File) bool { return f.Path == path })
	if i < 0 {
		return File{}, false
	}
	return m.Files[i], true
}

// Size is what all files need on a disk.
func (m Manifest) Size() int64 {
	var n int64
	for _, f := range m.Files {
		n += f.Size
	}
	return n
}

var (
	pathPart = regexp.MustCompile(`^[A-Za-z0-9_.@+:=\\-]+$`)
	unitForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:_.@\\-]*\.(service|socket|timer|path|target|mount|slice)$`)
)

// Check says what is wrong with a manifest by its own words alone.
func (m Manifest) Check() error {
	if len(m.Files) > MaxFiles {
		return fmt.Errorf("it lists %d files, the most is %d", len(m.Files), MaxFiles)
	}
	if err := m.checkFiles(); err != nil {
		return err
	}
	if err := m.checkUnits(); err != nil {
		return err
	}
	if err := m.checkGate(); err != nil {
		return err
	}
	if len(m.VersionCommand) > 0 {
		if err := m.checkCommand("version_command", m.VersionCommand); err != nil {
			return err
		}
	} else if m.hasBin() {
		return errors.New("it has programs in bin/ but no version_command")
	}
	if len(m.VersionText) > MaxPathLen {
		return fmt.Errorf("version_text is over %d bytes", MaxPathLen)
	}
	if _, self := m.Needs[m.Component]; self {
		return errors.New("it needs itself")
	}
	return nil
}

func (m Manifest) hasBin() bool {
	return slices.ContainsFunc(m.Files, func(f File) bool { return strings.HasPrefix(f.Path, "bin/") })
}

func (m Manifest) checkFiles() error {
	folded := map[string]string{} // every path and every folder of one, case folded
	folders := map[string]bool{}
	var size int64
	for _, f := range m.Files {
		if err := CheckPath(f.Path); err != nil {
			return err
		}
		if f.Path == ManifestName {
			return fmt.Errorf("%q can't list itself", f.Path)
		}
		fold := strings.ToLower(f.Path)
		if other, twice := folded[fold]; twice {
			return fmt.Errorf("%q and %q are one name", f.Path, other)
		}
		folded[fold] = f.Path
		for dir := path.Dir(fold); dir != "."; dir = path.Dir(dir) {
			folders[dir] = true
		}
		if f.Size < 0 || f.Size > MaxUnpacked {
			return fmt.Errorf("%q has a size of %d bytes", f.Path, f.Size)
		}
		if size += f.Size; size > MaxUnpacked {
			return fmt.Errorf("its files are over %d bytes together", MaxUnpacked)
		}
		if err := m.checkTarget(f.Path); err != nil {
			return err
		}
	}
	for fold, name := range folded {
		if folders[fold] {
			return fmt.Errorf("%q is a file and a folder", name)
		}
	}
	return nil
}

// CheckPath checks the name of a file in a bundle: relative, clean, plain.
func CheckPath(p string) error {
	if len(p) > MaxPathLen {
		return fmt.Errorf("path %q is over %d bytes", clip(p), MaxPathLen)
	}
	if p == "" || path.IsAbs(p) || path.Clean(p) != p || p == ".." || strings.HasPrefix(p, "../") {
		return fmt.Errorf("path %q must be relative and clean, without %q", clip(p), "..")
	}
	for _, part := range strings.Split(p, "/") {
		if !pathPart.MatchString(part) || strings.HasPrefix(part, "-") {
			return fmt.Errorf("path %q: %q must be letters, digits and . _ @ + : = \\ -", clip(p), clip(part))
		}
	}
	return nil
}

// checkTarget checks a file that has a place outside the set.
func (m Manifest) checkTarget(p string) error {
	if name, ok := strings.CutPrefix(p, UnitsFolder); ok {
		if !unitForm.MatchString(name) || len(name) > MaxPathLen {
			return fmt.Errorf("%q is no unit file that Sluice installs", p)
		}
		if strings.HasPrefix(name, "sluice-") && m.Component != "sluice" {
			return fmt.Errorf("%q: units named sluice-* belong to the component sluice", p)
		}
	}
	for _, folder := range []string{SysusersFolder, TmpfilesFolder} {
		if name, ok := strings.CutPrefix(p, folder); ok {
			stem := strings.TrimSuffix(name, ".conf")
			if stem == name || strings.Contains(name, "/") || (stem != string(m.Component) && !strings.HasPrefix(stem, string(m.Component)+"-")) {
				return fmt.Errorf("%q must be named %s.conf, or %s-….conf", p, m.Component, m.Component)
			}
		}
	}
	return nil
}

// UnitFiles returns the names of the unit files of a build, in its order.
func (m Manifest) UnitFiles() []string {
	var names []string
	for _, f := range m.Files {
		if name, ok := strings.CutPrefix(f.Path, UnitsFolder); ok {
			names = append(names, name)
		}
	}
	return names
}

// UnitFile returns the unit file that makes a unit: itself, or the template
// of an instance.
func UnitFile(unit string) string {
	name, suffix := unit, path.Ext(unit)
	if at := strings.Index(name, "@"); at >= 0 {
		return name[:at+1] + suffix
	}
	return unit
}

// Ships reports whether a build has the unit file of a unit.
func (m Manifest) Ships(unit string) bool { return slices.Contains(m.UnitFiles(), UnitFile(unit)) }

func (m Manifest) checkUnits() error {
	restarts := map[string]bool{}
	for _, r := range m.Units.Restart {
		if restarts[r.Unit] {
			return fmt.Errorf("restart lists %q twice", r.Unit)
		}
		restarts[r.Unit] = true
		if !strings.HasSuffix(r.Unit, ".service") {
			return fmt.Errorf("restart lists %q: only services are restarted; a socket is when its own file changed", r.Unit)
		}
		for _, in := range r.Inputs {
			if _, ok := m.File(in); !ok {
				return fmt.Errorf("restart of %q: input %q is no file of the bundle", r.Unit, in)
			}
		}
	}
	for list, units := range map[string][]string{"enable": m.Units.Enable, "inert": m.Units.Inert, "restart": keys(restarts), "quiesce": m.Units.Quiesce} {
		for i, u := range units {
			if !unitForm.MatchString(u) {
				return fmt.Errorf("%s lists %q, which is no unit that Sluice handles", list, clip(u))
			}
			if slices.Contains(units[:i], u) {
				return fmt.Errorf("%s lists %q twice", list, u)
			}
			if strings.HasPrefix(u, "sluice-") && m.Component != "sluice" {
				return fmt.Errorf("%s lists %q: units named sluice-* belong to the component sluice", list, u)
			}
			if (list == "quiesce" || list == "restart") && (strings.HasPrefix(u, "sluice-apply") || strings.HasPrefix(u, "sluice-recover")) {
				return fmt.Errorf("%s lists %q, which would end the transaction that does it", list, u)
			}
		}
	}
	for _, u := range m.Units.Inert {
		if slices.Contains(m.Units.Enable, u) {
			return fmt.Errorf("%q is in enable and in inert", u)
		}
	}
	for _, u := range m.Units.Quiesce {
		if restarts[u] {
			return fmt.Errorf("%q is in quiesce and in restart", u)
		}
		if !strings.HasSuffix(u, ".timer") && !strings.HasSuffix(u, ".path") && !strings.HasSuffix(u, ".service") {
			return fmt.Errorf("quiesce lists %q: only timers, paths and their oneshots can be", u)
		}
	}
	return nil
}

func keys(m map[string]bool) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func (m Manifest) checkCommand(what string, argv []string) error {
	f, ok := m.File(argv[0])
	if !ok {
		return fmt.Errorf("%s: %q is no file of the bundle", what, clip(argv[0]))
	}
	if f.Mode&0o111 == 0 {
		return fmt.Errorf("%s: %q is not executable", what, argv[0])
	}
	for _, a := range argv {
		if strings.ContainsAny(a, "\x00\n") {
			return fmt.Errorf("%s: %q has a control character", what, clip(a))
		}
	}
	return nil
}

func (m Manifest) checkGate() error {
	const maxProbes = 16
	if pass, soak := m.Gate.Windows(0); Duration(pass+soak) > MaxGate {
		return fmt.Errorf("gate: pass_within and soak are over %s together", time.Duration(MaxGate))
	}
	if len(m.Gate.Probes) > maxProbes {
		return fmt.Errorf("gate: it has %d probes, the most is %d", len(m.Gate.Probes), maxProbes)
	}
	for _, p := range m.Gate.Probes {
		if err := m.checkProbe(p); err != nil {
			return fmt.Errorf("gate: %w", err)
		}
	}
	return nil
}

func (m Manifest) checkProbe(p Probe) error {
	kinds := 0
	for _, there := range []bool{p.TCP != "", p.HTTP != "", len(p.Exec) > 0} {
		if there {
			kinds++
		}
	}
	if kinds != 1 {
		return errors.New("a probe has exactly one of tcp, http and exec")
	}
	if p.Status != 0 && (p.HTTP == "" || p.Status < 100 || p.Status > 599) {
		return fmt.Errorf("probe %s: status %d makes no sense", p, p.Status)
	}
	switch {
	case p.TCP != "":
		return loopback(p.TCP)
	case p.HTTP != "":
		u, err := url.Parse(p.HTTP)
		if err != nil || u.Scheme != "http" || u.User != nil || u.Fragment != "" || strings.ContainsAny(p.HTTP, " \r\n\t") {
			return fmt.Errorf("probe %q must be a plain http:// URL", clip(p.HTTP))
		}
		host := u.Host
		if u.Port() == "" {
			host = net.JoinHostPort(u.Hostname(), "80")
		}
		return loopback(host)
	}
	return m.checkCommand("probe", p.Exec)
}

func loopback(hostport string) error {
	a, err := netip.ParseAddrPort(hostport)
	if err != nil || !a.Addr().IsLoopback() {
		return fmt.Errorf("probe of %q: it must be a loopback address and a port", clip(hostport))
	}
	return nil
}

// DecodeRecipe reads the manifest.json that a bundle is made from: a manifest
// whose files are still to be found, and whose schema and platform may be
// left out.
func (s Speaks) DecodeRecipe(data []byte, here Platform) (Manifest, error) {
	var m Manifest
	var members map[string]jsontext.Value
	if err := json.Unmarshal(data, &members); err != nil {
		return m, tidy(err)
	}
	if members == nil {
		return m, errors.New("it is null")
	}
	for name, value := range map[string]any{"schema": One, "platform": here, "files": []File{}} {
		if _, there := members[name]; !there || name == "files" {
			members[name] = encode(value)
		}
	}
	if err := s.decode(ManifestLadder, encode(members), MaxManifest, &m, "schema"); err != nil {
		return m, err
	}
	if m.Version.Reserved() {
		return m, fmt.Errorf("%q is a reserved version: call the release something else", m.Version)
	}
	return m, nil
}
