package program

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"unicode"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/coreos/go-systemd/v22/journal"
	"golang.org/x/term"
)

// Log is where a program says what it does: plain words on a terminal,
// structured fields in the system's log.
var Log = slog.New(newHandler(os.Stderr))

// Report says how a program ended badly.
func Report(name string, err error) {
	if term.IsTerminal(int(os.Stderr.Fd())) || os.Getenv("JOURNAL_STREAM") == "" {
		fmt.Fprintf(os.Stderr, "%s: %s\n", name, err)
		return
	}
	Log.Error(err.Error())
}

// Status tells the service manager, or whoever watches the terminal, what
// goes on. Elsewhere it does nothing.
func Status(format string, args ...any) {
	text := strings.Map(func(r rune) rune { // a line break would begin another notification (sd_notify(3)), an escape move the cursor
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, fmt.Sprintf(format, args...))
	if sent, _ := daemon.SdNotify(false, "STATUS="+text); !sent && term.IsTerminal(int(os.Stderr.Fd())) {
		fmt.Fprintf(os.Stderr, "\r\033[K%s\r", text)
	}
}

// Ready tells the service manager that a long-running program is up.
func Ready() { _, _ = daemon.SdNotify(false, daemon.SdNotifyReady) }

// Beat tells the service manager's watchdog that all is well.
func Beat() { _, _ = daemon.SdNotify(false, daemon.SdNotifyWatchdog) }

// handler writes records in one of three forms.
type handler struct {
	out    io.Writer
	form   string // terminal, prefix, native
	fields []slog.Attr
}

func newHandler(f *os.File) *handler {
	h := &handler{out: f, form: "terminal"}
	switch {
	case term.IsTerminal(int(f.Fd())) || os.Getenv("JOURNAL_STREAM") == "":
	case journal.Enabled():
		h.form = "native"
	default:
		h.form = "prefix" // sd-daemon(3); a program without AF_UNIX can't speak the native protocol
	}
	return h
}

func (h *handler) Enabled(_ context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo || os.Getenv("SLUICE_DEBUG") != ""
}
func (h *handler) WithGroup(string) slog.Handler { return h }
func (h *handler) WithAttrs(a []slog.Attr) slog.Handler {
	c := *h
	c.fields = append(c.fields[:len(c.fields):len(c.fields)], a...)
	return &c
}

func priority(l slog.Level) journal.Priority {
	switch {
	case l >= slog.LevelError:
		return journal.PriErr
	case l >= slog.LevelWarn:
		return journal.PriWarning
	case l >= slog.LevelInfo:
		return journal.PriInfo
	}
	return journal.PriDebug
}

func (h *handler) Handle(_ context.Context, r slog.Record) error {
	var line strings.Builder
	line.WriteString(r.Message)
	vars := map[string]string{}
	add := func(a slog.Attr) bool {
		v := a.Value.String()
		vars["SLUICE_"+strings.ToUpper(a.Key)] = v
		if v == "" || strings.ContainsAny(v, " \t\n\"=") {
			v = fmt.Sprintf("%q", v)
		}
		fmt.Fprintf(&line, " %s=%s", a.Key, v)
		return true
	}
	for _, a := range h.fields {
		add(a)
	}
	r.Attrs(add)
	switch h.form {
	case "native":
		return journal.Send(line.String(), priority(r.Level), vars)
	case "prefix":
		_, err := fmt.Fprintf(h.out, "<%d>%s\n", priority(r.Level), strings.ReplaceAll(line.String(), "\n", " "))
		return err
	}
	_, err := fmt.Fprintln(h.out, line.String())
	return err
}
