// Tally reads `go test -json` and prints what a person wants: a line a test
// that failed or was skipped, with its output, a line a package, and a plain
// count last. With CI=true a skipped test is a failure: nothing is left out
// unsaid.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

func main() {
	verbose := len(os.Args) > 1 && os.Args[1] == "-v"
	passed, failed, skipped := 0, 0, 0
	output := map[string]*strings.Builder{}
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		var e event
		if json.Unmarshal(in.Bytes(), &e) != nil {
			fmt.Println(in.Text()) // not of the test runner
			continue
		}
		id := e.Package + " " + e.Test
		if output[id] == nil {
			output[id] = &strings.Builder{}
		}
		switch e.Action {
		case "output", "build-output":
			output[id].WriteString(e.Output)
			// What a test has to show, beside whether it passed.
			if _, show, ok := strings.Cut(e.Output, "SHOW "); ok {
				fmt.Print("     " + show)
			}
		case "pass", "fail", "skip":
			switch {
			case e.Test == "" && e.Action == "fail":
				fmt.Printf("FAIL %s\n%s", e.Package, output[id])
				failed++
			case e.Test == "" && e.Action == "pass":
				fmt.Printf("ok   %s (%.1fs)\n", e.Package, e.Elapsed)
			case e.Test == "":
			case e.Action == "pass":
				passed++
				if verbose {
					fmt.Printf("pass %s (%.1fs)\n", e.Test, e.Elapsed)
				}
			case e.Action == "fail":
				failed++
				fmt.Printf("FAIL %s %s (%.1fs)\n%s", e.Package, e.Test, e.Elapsed, output[id])
			case e.Action == "skip":
				skipped++
				fmt.Printf("skip %s %s\n%s", e.Package, e.Test, output[id])
			}
			delete(output, id)
		case "build-fail":
			failed++
			for _, out := range output {
				fmt.Print(out)
			}
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	if failed > 0 || passed == 0 || skipped > 0 && os.Getenv("CI") == "true" {
		os.Exit(1)
	}
}
