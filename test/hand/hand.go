// Package hand drives the programs by hand, as processes, on a tree that is
// not the running system: a folder store, a key, and a box under -root.
package hand
