package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"sluice/internal/outcome"
)

// progress shows a bar on a terminal, and nothing anywhere else. done is told
// of the bytes that are done, of all; end takes the bar away.
func progress(label string) (done func(n, total int64), end func()) {
	if !term.IsTerminal(int(os.Stderr.Fd())) {
		return func(int64, int64) {}, func() {}
	}
	var bar *progressbar.ProgressBar
	done = func(n, total int64) {
		if bar == nil {
			bar = progressbar.NewOptions64(total, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription(label),
				progressbar.OptionShowBytes(true), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
		}
		_ = bar.Set64(n)
	}
	return done, func() {
		if bar != nil {
			_ = bar.Finish()
		}
	}
}

// plain is text of somebody else's as it may be shown on a terminal: it can't move
// the cursor, nor take a line away.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, strings.ToValidUTF8(s, "?"))
}

// confirm asks the person at the terminal. Without one it says which flag
// stands for yes.
func confirm(out io.Writer, question string) error {
	if !term.IsTerminal(int(os.Stdin.Fd())) {
		return outcome.Usage("%s there is nobody to ask: add -yes if you mean it", question)
	}
	fmt.Fprintf(out, "%s [y/N] ", question)
	line, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil {
		return err
	}
	if a := strings.ToLower(strings.TrimSpace(line)); a != "y" && a != "yes" {
		return fmt.Errorf("not confirmed: nothing was changed")
	}
	return nil
}
