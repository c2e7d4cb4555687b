package layout

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// Every Place that the source declares has exactly one row, parents first.
func TestTableIsWhole(t *testing.T) {
	src, err := os.ReadFile("layout.go")
	if err != nil {
		t.Fatal(err)
	}
	outside := map[Place]bool{SystemdUnits: true, Sysusers: true, Tmpfiles: true} // the service manager's, not ours
	rows := map[Place]int{}
	for _, r := range Table {
		rows[r.Place]++
		if r.Why == "" || r.Owner == "" || r.Writer == "" || r.Readers == "" {
			t.Errorf("%s: a column is empty", r.Place)
		}
	}
	declared := regexp.MustCompile(`Place += "([^"]+)"`).FindAllStringSubmatch(string(src), -1)
	if len(declared) < 40 {
		t.Fatalf("only %d places found in layout.go: the pattern is out of date", len(declared))
	}
	for _, m := range declared {
		want := 1
		if outside[Place(m[1])] {
			want = 0
		}
		if rows[Place(m[1])] != want {
			t.Errorf("%s: %d rows, want %d", m[1], rows[Place(m[1])], want)
		}
	}
	seen := map[string]bool{"/etc": true, "/data": true, "/opt": true, "/run": true, "/run/sluice-pointer": true}
	for _, r := range Table {
		parent := string(r.Place[:strings.LastIndex(string(r.Place), "/")])
		if !seen[parent] {
			t.Errorf("%s comes before its folder", r.Place)
		}
		if r.Kind == Folder {
			seen[string(r.Place)] = true
		}
	}
}

func TestPath(t *testing.T) {
	if got := Root("/mnt").Path(Hint, "router"); got != "/mnt/data/sluice/router/verified/requested.json" {
		t.Error(got)
	}
	if Root("/mnt").Live() || !Root("/").Live() || !Root("//").Live() {
		t.Error("only / is live")
	}
}
