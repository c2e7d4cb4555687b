package fleet

import (
	"path/filepath"
	"testing"

	"sluice/internal/contract"
)

// The sums of a release are a stranger's until their signature is checked; after that
// they still name no file but one beside them.
func FuzzSums(f *testing.F) {
	f.Add("v1.0", []byte("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  edge_1.0_linux-amd64.tar.zst\n"))
	f.Add("../x", []byte("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 *../../etc/passwd\n"))
	f.Fuzz(func(t *testing.T, tag string, data []byte) {
		v, err := version(tag)
		if err != nil {
			return
		}
		if !filepath.IsLocal(tag) || filepath.Base(tag) != tag {
			t.Errorf("tag %q", tag)
		}
		digests, err := parseSums(data)
		if err != nil {
			return
		}
		s := Sums{tag, v, digests}
		for name, digest := range digests {
			if filepath.Base(name) != name || name == "." {
				t.Errorf("name %q", name)
			}
			if _, err := contract.Parse[contract.Digest](string(digest)); err != nil {
				t.Error(err)
			}
		}
		for _, c := range s.Components() {
			if len(s.Platforms(c)) == 0 {
				t.Errorf("%s has no platform", c)
			}
		}
	})
}
