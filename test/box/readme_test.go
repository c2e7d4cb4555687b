package box

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"sluice/test/suite"
)

// What README.md calls five minutes.
const fiveMinutes = 5 * time.Minute

// The README's first box, command by command, in a fresh box: from a folder, from an S3
// bucket, and from behind a door.
func TestReadme(t *testing.T) {
	data, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, chapter, found := strings.Cut(string(data), "## A real box in five minutes")
	chapter, _, ends := strings.Cut(chapter, "\n## ")
	chapter, rest, more := strings.Cut(chapter, "**An S3 bucket instead of a folder**")
	if !found || !ends || !more {
		t.Fatal("the README's chapter is not where it was")
	}
	blocks := func(text string) string {
		var b strings.Builder
		for _, m := range regexp.MustCompile("(?s)```\n(.*?)```").FindAllStringSubmatch(text, -1) {
			b.WriteString(m[1])
		}
		return b.String()
	}
	script := "set -euo pipefail; cd /srv/repo; export HOME=/root PATH=$PATH:/usr/local/bin\n" + blocks(chapter)
	for _, line := range []string{"make install", "sluice init -key operator.pub", "sluice enroll deployment.json\n", "sluice update -file hello.tar.zst -yes", "sluice status -watch\n", "export SLUICE_STORE=file:///srv/bucket"} {
		if !strings.Contains(script, line) {
			t.Fatalf("the README's commands have changed: no %q", line)
		}
	}
	script = strings.Replace(script, "sluice status -watch\n", "", 1) // it has no end
	s3 := blocks(rest)
	if strings.Count(s3, "export ") != 2 {
		t.Fatalf("the README's commands have changed: %q", s3)
	}
	replace := func(s, old, new string) string {
		t.Helper()
		if !strings.Contains(s, old) {
			t.Fatalf("the README's commands have changed: no %q", old)
		}
		return strings.Replace(s, old, new, 1)
	}
	for name, shape := range map[string]func(t *testing.T, b *Box) string{
		"folder": func(*testing.T, *Box) string { return script },
		"S3": func(t *testing.T, b *Box) string {
			url, env, _ := startS3(t, b)
			exports := strings.NewReplacer("'s3://bucket/prefix?endpoint=https://s3.example.com&region=eu-1'", "'"+url+"'", "AWS_ACCESS_KEY_ID=…", env[0], "AWS_SECRET_ACCESS_KEY=…", env[1]).Replace(s3)
			s := replace(script, "export SLUICE_STORE=file:///srv/bucket SLUICE_KEY", exports+"export SLUICE_KEY")
			return replace(s, "sluice enroll deployment.json\n", "sluice enroll deployment.json -s3-credentials "+Operator+"/s3\n")
		},
		"door": func(t *testing.T, b *Box) string {
			authority := suite.NewAuthority(t)
			dir := t.TempDir()
			cert, key := authority.Write(dir, "door", authority.Pair("127.0.0.1"))
			for from, to := range map[string]string{cert: "door.crt", key: "door.key"} {
				must[bool](t)(true, b.Copy(from, "/srv/repo/"+to))
			}
			must[bool](t)(true, b.Write("/srv/repo/ca.crt", string(authority.PEM), 0o644))
			s := replace(script, "sluice init -key operator.pub", "mkdir -p /srv/bucket; nohup door -store \"$SLUICE_STORE\" -cert door.crt -tls-key door.key >/srv/door.log 2>&1 &\nsluice init -box-store https://127.0.0.1:8443 -key operator.pub")
			return replace(s, "sluice enroll deployment.json\n", "sluice door token box-1 >token\nsluice enroll deployment.json -label box-1 -token-file token -ca ca.crt\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t)
			if out, err := exec.Command("cp", "-r", "../..", filepath.Join(b.Root, "srv/repo")).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			ctx, cancel := context.WithTimeout(t.Context(), fiveMinutes)
			defer cancel()
			commands := shape(t, b)
			began := time.Now()
			out, err := b.Exec(ctx, "bash", "-c", commands)
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			store := regexp.MustCompile(`(?m)^export SLUICE_STORE=\S+`).FindString(commands)
			exports := regexp.MustCompile(`(?m)^export AWS\S*.*$`).FindString(commands)
			err = Until(ctx, "the box to run hello 1.0", fiveMinutes, func() (bool, error) {
				out, err := b.Exec(ctx, "bash", "-c", fmt.Sprintf("%s\n%s\n/usr/local/bin/sluice status", store, exports))
				return regexp.MustCompile(`hello +stable +1\.0 +1\.0 +current`).MatchString(out), err
			})
			if err != nil {
				t.Fatal(err)
			}
			must[string](t)(b.Exec(ctx, "systemctl", "is-active", "hello.service"))
			t.Logf("SHOW README, %s: from nothing to the first rolled box in %s", name, time.Since(began).Round(time.Second))
		})
	}
}
