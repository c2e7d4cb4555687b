package hand

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every flag that -help lists is in the program's man page.
func TestManPagesNameEveryFlag(t *testing.T) {
	for page, commands := range map[string][]string{
		"sluice-fetch.8": {"fetch", "fetch watch", "fetch once", "fetch pointer"}, "sluice-verify.8": {"verify", "verify pointer", "verify bundle"},
		"sluice-door.8": {"door"}, "sluice-stage.8": {"stage"}, "sluice-apply.8": {"apply"}, "sluice-recover.8": {"recover"},
		"sluice.1": {"sluice", "sluice keygen", "sluice init", "sluice bundle", "sluice update", "sluice rollback", "sluice refresh", "sluice status", "sluice why", "sluice door", "sluice door token", "sluice trust", "sluice trust show", "sluice trust add", "sluice trust remove", "sluice trust threshold",
			"sluice trust sign", "sluice trust publish", "sluice enroll", "sluice box", "sluice hold", "sluice resume"},
	} {
		data, err := os.ReadFile(filepath.Join("../../docs/man", page))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(data), `\-`, "-")
		for _, command := range commands {
			words := strings.Fields(command)
			status, out := run(t, words[0], append(words[1:], "-help")...)
			if status != 0 || !strings.Contains(out, "exit status") || !strings.Contains(out, "USAGE") {
				t.Errorf("%s -help: exit status %d: %s", command, status, out)
			}
			for _, m := range regexp.MustCompile(`(?m)^  (-[a-z0-9-]+)`).FindAllStringSubmatch(out, -1) {
				if !strings.Contains(text, m[1]) {
					t.Errorf("%s does not name %s of %s", page, m[1], command)
				}
			}
		}
	}
}

func TestUsageErrors(t *testing.T) {
	for line, c := range map[string]struct {
		status int
		says   string
	}{
		"fetch":                             {2, "say what to do"},
		"fetch nonsense":                    {2, "say what to do"},
		"fetch once extra":                  {2, "one word too many"},
		"stage":                             {2, "say which component"},
		"stage -component":                  {2, "needs a value"},
		"stage -component Edge":             {2, "is no component"},
		"stage -component box":              {2, "reserved name"},
		"stage -nonsense":                   {2, "there is no flag"},
		"apply -component edge extra":       {2, "one word too many"},
		"recover":                           {2, "say -component NAME or -boot"},
		"recover -boot -component edge":     {2, "only one of them"},
		"verify bundle":                     {2, "say which file"},
		"verify bundle /does/not/exist":     {1, "no such file"},
		"sluice update":                     {2, "say what to promote"},
		"sluice update edge rim":            {2, "one word too many"},
		"sluice update -file x -spread 48h": {2, "must be between"},
		"sluice update -file x":             {78, "say which store"},
		"sluice rollback -store file:///x":  {2, "say which component"},
		"sluice init -store nonsense":       {78, "no URL"},
		"sluice keygen":                     {2, "say where to"},
		"sluice status -store file:///none": {78, "no deployment"},
		"sluice enroll":                     {2, "say which deployment file"},
		"sluice box -root /nowhere":         {78, "no box yet"},
		"sluice hold -root /nowhere":        {78, "no box yet"},
		"stage -component edge -root /none": {1, "no such file"},
	} {
		words := strings.Fields(line)
		status, out := run(t, words[0], words[1:]...)
		if status != c.status || !strings.Contains(out, c.says) {
			t.Errorf("%s: exit status %d, want %d and %q: %s", line, status, c.status, c.says, out)
		}
	}
}

// A key that nothing reads may be a misspelt restriction.
func TestUnknownKeys(t *testing.T) {
	w := newWorld(t)
	conf := filepath.Join(string(w.root), "etc/sluice/box.conf")
	data, err := os.ReadFile(conf)
	w.must(err)
	for _, line := range []string{"SLUICE_SORE=x", "STORE=x", "SLUICE_LABEL=twice"} {
		w.must(os.WriteFile(conf, append(data, line+"\n"...), 0o644))
		if status, out := run(t, "fetch", "once", "-root", string(w.root)); status != 78 || !strings.Contains(out, strings.SplitN(line, "=", 2)[0]) {
			t.Errorf("%s: exit status %d: %s", line, status, out)
		}
	}
}

func TestKeysAreNotOverwrittenNorShown(t *testing.T) {
	w := newWorld(t)
	name := filepath.Join(w.dir, "key")
	if status, out := run(t, "sluice", "keygen", "-o", name); status != 1 || !strings.Contains(out, "never overwritten") {
		t.Errorf("%d: %s", status, out)
	}
	st, err := os.Stat(name + ".key")
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	w.must(os.Chmod(name+".key", 0o644))
	status, out := run(t, "sluice", "rollback", "edge", "-store", w.store.String(), "-key", name+".key", "-yes")
	if status != 78 || !strings.Contains(out, "can be read by others") || strings.Contains(out, "PRIVATE") {
		t.Errorf("%d: %s", status, out)
	}
}
