// Package layout is the table of every fixed path of a box: what it is, who
// owns it, who writes it, who reads it, and why it exists. Open it first.
//
// Paths are written as Places, with {component} standing for
// the name of a component; Root turns a Place into a path below a prefix.
package layout

import (
	"path/filepath"
	"strconv"
	"strings"
)

// A Place is a fixed path of a box. {component} stands for a component's name,
// {n} for the number of a trust document.
type Place string

// The places of a box. Table says everything else about them.
const (
	Etc           Place = "/etc/sluice"
	BoxConf       Place = "/etc/sluice/box.conf"
	ComponentConf Place = "/etc/sluice/{component}.conf"
	Identity      Place = "/etc/sluice/identity"
	Hold          Place = "/etc/sluice/hold"

	Data         Place = "/data/sluice"
	DataOf       Place = "/data/sluice/{component}"
	Incoming     Place = "/data/sluice/{component}/incoming"
	Pointer      Place = "/data/sluice/{component}/incoming/pointer.json"
	Pending      Place = "/data/sluice/{component}/incoming/pending.json"
	PointerStep  Place = "/data/sluice/{component}/incoming/trust-{n}.json"
	FetchedMark  Place = "/data/sluice/{component}/incoming/mark"
	Fetched      Place = "/data/sluice/{component}/incoming/mark/fetched"
	Verified     Place = "/data/sluice/{component}/verified"
	Hint         Place = "/data/sluice/{component}/verified/requested.json"
	Verdict      Place = "/data/sluice/{component}/verified/verdict.json"
	RequestMark  Place = "/data/sluice/{component}/verified/mark"
	Requested    Place = "/data/sluice/{component}/verified/mark/requested"
	Opt          Place = "/opt/sluice"
	OptOf        Place = "/opt/sluice/{component}"
	Lock         Place = "/opt/sluice/{component}/lock"
	Seen         Place = "/opt/sluice/{component}/seen.json"
	Applied      Place = "/opt/sluice/{component}/applied.json"
	Result       Place = "/opt/sluice/{component}/result.json"
	StagedRecord Place = "/opt/sluice/{component}/staged.json"
	Versions     Place = "/opt/sluice/{component}/versions.json"
	Journal      Place = "/opt/sluice/{component}/journal.json"
	Drift        Place = "/opt/sluice/{component}/drift.json"
	Trial        Place = "/opt/sluice/{component}/trial.json"
	Trust        Place = "/opt/sluice/{component}/trust"
	Sets         Place = "/opt/sluice/{component}/sets"
	Current      Place = "/opt/sluice/{component}/current"
	Good         Place = "/opt/sluice/{component}/good"
	Prior        Place = "/opt/sluice/{component}/prior"
	StagedMark   Place = "/opt/sluice/{component}/mark"
	Staged       Place = "/opt/sluice/{component}/mark/staged"
	Reserve      Place = "/opt/sluice/{component}/reserve"
	HostLock     Place = "/opt/sluice/host.lock"

	PointerRun    Place = "/run/sluice-pointer/{component}"
	PointerAnswer Place = "/run/sluice-pointer/{component}/pointer.json"
	AnswerStep    Place = "/run/sluice-pointer/{component}/trust-{n}.json"
	FetchRun      Place = "/run/sluice-fetch"
	FetchLock     Place = "/run/sluice-fetch/lock"
	VerifyRun     Place = "/run/sluice-verify"
	VerifyLock    Place = "/run/sluice-verify/lock"

	SystemdUnits Place = "/etc/systemd/system"
	Sysusers     Place = "/etc/sysusers.d"
	Tmpfiles     Place = "/etc/tmpfiles.d"
)

// The users of a box. Files of root are owned by root:root.
const (
	UserRoot    = "root"
	UserFetch   = "sluice-fetch"
	UserVerify  = "sluice-verify"
	UserPointer = "sluice-pointer"
)

// Pipeline is the component that Sluice itself is.
const Pipeline = "sluice"

// A Kind is what stands at a Place.
type Kind string

// The kinds of a Place.
const (
	Folder Kind = "folder"
	File   Kind = "file"
	Link   Kind = "link"
	Marker Kind = "marker" // an entry whose existence is a fact; of any kind
)

// A Row says all there is to say about one Place.
type Row struct {
	Place   Place
	Kind    Kind
	Mode    uint32 // permission bits, with the setgid bit as 02000; 0 for links and markers
	Owner   string
	Group   string
	Writer  string
	Readers string
	Why     string
}

// Table is the box. Folders come before what is in them.
var Table = []Row{
	{Etc, Folder, 0o755, UserRoot, UserRoot, "enroll", "all", "what the owner of the box decides"},
	{BoxConf, File, 0o644, UserRoot, UserRoot, "enroll", "all", "SLUICE_ keys of the box; no secrets"},
	{ComponentConf, File, 0o644, UserRoot, UserRoot, "enroll", "all", "one for each component the box follows: its channel"},
	{Identity, Folder, 0o700, UserRoot, UserRoot, "enroll", "systemd (LoadCredential=)", "what this box proves itself to the store with; always there, may be empty"},
	{Hold, File, 0o644, UserRoot, UserRoot, "sluice hold", "all", "exists: nothing new until it is gone"},

	{Data, Folder, 0o755, UserRoot, UserRoot, "tmpfiles", "all", "the unprivileged side"},
	{DataOf, Folder, 0o755, UserRoot, UserRoot, "enroll", "all", "one component's unprivileged side; nobody but root renames what is in it"},
	{Incoming, Folder, 0o2750, UserFetch, UserVerify, "fetch", "verify", "<version>/bundle.unverified(.part): bytes from the network, nothing proven"},
	{Pointer, File, 0o640, UserFetch, UserVerify, "fetch", "verify", "the envelope that fetch acted on, as it came"},
	{PointerStep, File, 0o640, UserFetch, UserVerify, "fetch", "verify", "the trust documents between root's newest and the one that vouches for the pointer"},
	{Pending, File, 0o640, UserFetch, UserVerify, "fetch", "fetch", "what fetch waits for and how long it has waited"},
	{FetchedMark, Folder, 0o2770, UserFetch, UserVerify, "fetch", "verify", "holds the marker, so that verify may take it away"},
	{Fetched, Marker, 0, UserFetch, UserVerify, "fetch", "sluice-verify@.path", "something to verify"},
	{Verified, Folder, 0o2750, UserVerify, UserFetch, "verify", "stage, fetch", "<version>/tree: unpacked, every digest right"},
	{Hint, File, 0o640, UserVerify, UserFetch, "verify", "stage", "the one small file root reads from this side; never believed, only checked"},
	{Verdict, File, 0o640, UserVerify, UserFetch, "verify", "fetch", "what verify thinks of the last download"},
	{RequestMark, Folder, 0o700, UserVerify, UserVerify, "verify", "stage", "holds the marker"},
	{Requested, Marker, 0, UserVerify, UserVerify, "verify", "sluice-stage@.path", "something to stage"},

	{Opt, Folder, 0o755, UserRoot, UserRoot, "enroll", "all", "root's side"},
	{HostLock, File, 0o600, UserRoot, UserRoot, "apply, recover", "root", "one conversation with the service manager at a time"},
	{OptOf, Folder, 0o755, UserRoot, UserRoot, "enroll", "all", "root's state of one component"},
	{Lock, File, 0o600, UserRoot, UserRoot, "stage, apply, recover", "root", "one root program at a time; 0600, since whoever opens a lock can hold it"},
	{Seen, File, 0o644, UserRoot, UserRoot, "stage, enroll", "all", "the watermark of each channel: decides replay"},
	{Applied, File, 0o644, UserRoot, UserRoot, "apply, recover", "all", "which set is good"},
	{Result, File, 0o644, UserRoot, UserRoot, "stage, apply, recover", "all", "how the last promote ended"},
	{StagedRecord, File, 0o644, UserRoot, UserRoot, "stage, enroll", "apply", "what apply may converge to"},
	{Versions, File, 0o644, UserRoot, UserRoot, "stage, enroll", "all", "the manifest digests that versions had: a version never comes back with other bytes"},
	{Journal, File, 0o644, UserRoot, UserRoot, "apply, recover", "all", "the open transaction; exists: something to finish or undo"},
	{Drift, File, 0o644, UserRoot, UserRoot, "apply, heal, stage", "all", "that the good set is damaged on the disk; there only while it is"},
	{Trust, Folder, 0o755, UserRoot, UserRoot, "enroll, stage", "all", "<n>.json: the trust documents root has accepted"},
	{Sets, Folder, 0o755, UserRoot, UserRoot, "stage, enroll", "all", "<version>: immutable once named; .<version>.partial while it is copied"},
	{Current, Link, 0, UserRoot, UserRoot, "apply, recover", "units", "the set that units run from"},
	{Good, Link, 0, UserRoot, UserRoot, "apply, recover", "units of root", "the last set that passed a gate here"},
	{Trial, File, 0o644, UserRoot, UserRoot, "apply, heal, stage", "all", "component sluice: a self-update that has yet to prove itself in use; there only until then"},
	{Prior, Link, 0, UserRoot, UserRoot, "apply, recover, heal", "sluice-trial.service", "component sluice, with trial.json: the last set that proved itself, which heal runs from and goes back to"},
	{StagedMark, Folder, 0o700, UserRoot, UserRoot, "stage", "apply", "holds the marker"},
	{Staged, Marker, 0, UserRoot, UserRoot, "stage", "sluice-apply@.path", "something to apply"},

	{Reserve, File, 0o600, UserRoot, UserRoot, "apply, recover", "nobody", "room that going back can count on when the disk is full; there only while a roll is open"},

	{PointerRun, Folder, 0o755, UserPointer, UserPointer, "fetch pointer", "stage", "made by systemd (RuntimeDirectory=)"},
	{PointerAnswer, File, 0o644, UserPointer, UserPointer, "fetch pointer", "stage", "the envelope root asked for; removed once read"},
	{AnswerStep, File, 0o644, UserPointer, UserPointer, "fetch pointer", "stage", "the trust documents after root's newest"},
	{FetchRun, Folder, 0o755, UserFetch, UserFetch, "fetch", "fetch", "made by systemd (RuntimeDirectory=)"},
	{FetchLock, File, 0o600, UserFetch, UserFetch, "fetch", "fetch", "one fetch at a time"},
	{VerifyRun, Folder, 0o755, UserVerify, UserVerify, "verify", "verify", "made by systemd (RuntimeDirectory=)"},
	{VerifyLock, File, 0o600, UserVerify, UserVerify, "verify", "verify", "one verify at a time on a host"},
}

// RowOf returns the row of p. It panics for a Place that is not in Table:
// that is a mistake in the program.
func RowOf(p Place) Row {
	for _, r := range Table {
		if r.Place == p {
			return r
		}
	}
	panic("layout: no row for " + string(p))
}

// A Root is the tree that a program works on: "/" on a box.
type Root string

// Live reports whether this is the running system, whose service manager may
// be spoken to.
func (r Root) Live() bool { return filepath.Clean(string(r)) == "/" }

// Path returns where p is for component, below this root.
func (r Root) Path(p Place, component string) string {
	return r.Join(strings.ReplaceAll(string(p), "{component}", component))
}

// Join returns an absolute path of the box below this root.
func (r Root) Join(path string) string { return filepath.Join(string(r), path) }

// Set returns the folder of one version's set.
func (r Root) Set(component, version string) string {
	return filepath.Join(r.Path(Sets, component), version)
}

// PartialSet returns the folder that a set has while it is being built.
func (r Root) PartialSet(component, version string) string {
	return filepath.Join(r.Path(Sets, component), "."+version+".partial")
}

// TrustFile returns where trust document n of component is.
func (r Root) TrustFile(component string, n int) string {
	return filepath.Join(r.Path(Trust, component), strconv.Itoa(n)+".json")
}

// StepName returns the name that trust document n has where it is handed on.
func StepName(n int) string {
	return strings.Replace(filepath.Base(string(AnswerStep)), "{n}", strconv.Itoa(n), 1)
}

// StepNumber is the number in a StepName.
func StepNumber(name string) (int, bool) {
	digits, ok := strings.CutPrefix(strings.TrimSuffix(name, ".json"), "trust-")
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil && StepName(n) == name
}

// Download returns the folder of one version below incoming/.
func (r Root) Download(component, version string) string {
	return filepath.Join(r.Path(Incoming, component), version)
}

// ObjectName is the name of a download below its version's folder. What is not
// proven says so.
const ObjectName = "bundle.unverified"

// Tree returns the verified tree of one version.
func (r Root) Tree(component, version string) string {
	return filepath.Join(r.Path(Verified, component), version, "tree")
}
