package bundle

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"sluice/internal/contract"
)

const (
	maxWarning = 20 // warnings of the linter that are passed on
	lintTime   = 20 * time.Second
)

// Lint asks systemd-analyze what it thinks of the units. Anything it says is
// a warning: it exits 0 on a misspelt directive. Without it nothing is said.
func Lint(ctx context.Context, tree string, m contract.Manifest) []string {
	warnings := []string{}
	if len(m.UnitFiles()) == 0 {
		return warnings
	}
	ctx, cancel := context.WithTimeout(ctx, lintTime)
	defer cancel()
	args := []string{"verify", "--man=no", "--recursive-errors=no"}
	for _, u := range m.UnitFiles() {
		args = append(args, filepath.Join(tree, contract.UnitsFolder, u))
	}
	cmd := exec.CommandContext(ctx, "systemd-analyze", args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")} // not our notification socket
	out, _ := cmd.CombinedOutput()
	for line := range bytes.Lines(out) {
		s := strings.TrimSpace(string(line))
		// The programs of a build are not on this box yet.
		if s == "" || strings.Contains(s, "/opt/sluice/"+string(m.Component)+"/") || len(warnings) == maxWarning {
			continue
		}
		warnings = append(warnings, strings.ReplaceAll(s, tree+"/", ""))
	}
	return warnings
}
