package door

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/store"
)

// Limits of a request.
const (
	maxURI = 1 << 10 // bytes of a request's target
)

// A kind is what a request is for.
type kind string

const (
	bell      kind = "serial"
	pointer   kind = "pointer"
	trust     kind = "trust"
	asset     kind = "bootstrap"
	heartbeat kind = "heartbeat"
)

// An ask is a request whose form is right. Whether its caller may make it is
// another question.
type ask struct {
	kind   kind
	fleet  string         // whose tree; "" for that of the whole store
	key    string         // in that tree
	label  contract.Label // of a heartbeat
	wait   time.Duration  // for the bell
	offset int64          // of an asset; -1 for all of it
	size   int64          // of a heartbeat
}

// A refusal is an answer that needs no store.
type refusal struct {
	status int
	text   string
}

func (r *refusal) Error() string { return r.text }

func refuse(status int, text string) error { return &refusal{status, text} }

var (
	// Everything that a key can be made of: no escapes, no backslash, no space.
	targetForm = regexp.MustCompile(`^/[A-Za-z0-9._/-]+$`)
	trustForm  = regexp.MustCompile(`^control/trust/([1-9][0-9]{0,5})\.json$`)
	assetForm  = regexp.MustCompile(`^bootstrap/([^/]+)/([^/]+)/([^/]+)$`)
	beatForm   = regexp.MustCompile(`^status/boxes/([^/]+)\.json$`)
	rangeForm  = regexp.MustCompile(`^bytes=(0|[1-9][0-9]{0,17})-$`)
	waitForm   = regexp.MustCompile(`^wait=([1-9][0-9]?)s$`)
)

// parse reads a request by exact shapes. Whatever has another shape is not there:
// a door lists nothing, and has no other rooms.
func parse(r *http.Request) (ask, error) {
	a := ask{offset: -1}
	path, query, asked := strings.Cut(r.RequestURI, "?")
	if len(r.RequestURI) > maxURI || !targetForm.MatchString(path) || strings.Contains(path, "//") || strings.Contains(path, "/.") {
		return a, refuse(http.StatusNotFound, "there is nothing of that name")
	}
	a.key = path[1:]
	if rest, ok := strings.CutPrefix(a.key, "fleets/"); ok {
		fleet, key, ok := strings.Cut(rest, "/")
		if _, err := contract.Parse[contract.Label](fleet); !ok || err != nil {
			return a, refuse(http.StatusNotFound, "there is nothing of that name")
		}
		a.fleet, a.key = fleet, key
	}
	if !a.shape() {
		return a, refuse(http.StatusNotFound, "there is nothing of that name")
	}
	if err := a.method(r); err != nil {
		return a, err
	}
	if asked {
		m := waitForm.FindStringSubmatch(query)
		if m == nil || a.kind != bell || r.Method != http.MethodGet {
			return a, refuse(http.StatusBadRequest, "no such question: only control/serial takes one, wait=1s to wait=60s")
		}
		s, _ := strconv.Atoi(m[1])
		if a.wait = time.Duration(s) * time.Second; a.wait > store.MaxWait {
			return a, refuse(http.StatusBadRequest, "wait at most 60s")
		}
	}
	return a, a.ranges(r)
}

// shape finds out what a key is of.
func (a *ask) shape() bool {
	if contract.KeyForm(a.key) != nil {
		return false
	}
	if a.key == contract.SerialKey {
		a.kind = bell
		return true
	}
	if _, _, _, ok := contract.ParsePointerKey(a.key); ok {
		a.kind = pointer
		return true
	}
	if trustForm.MatchString(a.key) {
		a.kind = trust
		return true
	}
	if m := assetForm.FindStringSubmatch(a.key); m != nil {
		_, cerr := contract.Parse[contract.Component](m[1])
		_, verr := contract.Parse[contract.Version](m[2])
		a.kind = asset
		return cerr == nil && verr == nil
	}
	if m := beatForm.FindStringSubmatch(a.key); m != nil {
		label, err := contract.Parse[contract.Label](m[1])
		a.kind, a.label = heartbeat, label
		return err == nil
	}
	return false
}

// method checks what is to be done, and with which body.
func (a *ask) method(r *http.Request) error {
	if a.kind != heartbeat {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			return refuse(http.StatusMethodNotAllowed, "this can only be read")
		}
		if r.ContentLength != 0 {
			return refuse(http.StatusBadRequest, "who reads sends no body")
		}
		return nil
	}
	switch {
	case r.Method != http.MethodPut:
		return refuse(http.StatusMethodNotAllowed, "a heartbeat can only be written")
	case r.ContentLength < 0:
		return refuse(http.StatusLengthRequired, "say how long the heartbeat is")
	case r.ContentLength == 0:
		return refuse(http.StatusBadRequest, "an empty heartbeat")
	case r.ContentLength > contract.MaxHeartbeat:
		return refuse(http.StatusRequestEntityTooLarge, "a heartbeat has at most 65536 bytes")
	case r.Header.Get("Content-Encoding") != "" || r.Header.Get("Content-Range") != "":
		return refuse(http.StatusUnsupportedMediaType, "a heartbeat is sent whole, and as it is")
	case r.Header.Get("If-Match") != "" || r.Header.Get("If-None-Match") != "":
		return refuse(http.StatusPreconditionFailed, "a heartbeat is written without conditions")
	}
	a.size = r.ContentLength
	return nil
}

// ranges reads where an asset is to begin.
func (a *ask) ranges(r *http.Request) error {
	all := r.Header.Values("Range")
	if len(all) == 0 {
		return nil
	}
	m := rangeForm.FindStringSubmatch(all[0])
	if len(all) > 1 || m == nil || a.kind != asset {
		return refuse(http.StatusRequestedRangeNotSatisfiable, "only an object below bootstrap/ is read in part, as bytes=N-")
	}
	a.offset, _ = strconv.ParseInt(m[1], 10, 64)
	return nil
}
