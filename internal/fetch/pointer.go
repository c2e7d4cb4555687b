package fetch

import (
	"context"
	"io"
	"os"
	"path/filepath"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
)

// Pointer gets the envelope of one component's pointer for root and puts it,
// raw, into folder, or to out if there is no folder. It parses nothing: root
// trusts its own eyes only.
//
// It is a program run of its own, under a user id of its own, so that a
// captured fetch or verify can't choose what root sees.
func Pointer(ctx context.Context, root layout.Root, s store.Store, name contract.Component, folder string, out io.Writer) error {
	disk := &durable.Disk{Replace: true}
	answer := ""
	if folder != "" {
		answer = filepath.Join(folder, filepath.Base(string(layout.PointerAnswer)))
		// First, so that an answer of an earlier run is never taken for this one's.
		if err := disk.RemoveTree(answer); err != nil {
			return err
		}
	}
	conf, err := config.LoadComponent(root, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	o, err := store.Pointer(ctx, s, contract.Spoken, name, conf.Channel)
	if err != nil {
		return outcome.Defer(outcome.Store, "%w", err)
	}
	if folder == "" {
		_, err := out.Write(o.Data)
		return err
	}
	if err := trustDocuments(ctx, disk, s, record.State{Root: root, Disk: disk, Name: name}, folder); err != nil {
		return err
	}
	return disk.WriteFile(answer, o.Data, 0o644)
}

// trustDocuments gets the trust documents after the one that root has, for a
// walk of root's.
func trustDocuments(ctx context.Context, disk *durable.Disk, s store.Store, state record.State, folder string) error {
	set, err := state.Trust()
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, e := range entries { // what an earlier run got may have been wrong, or is behind us
		if _, step := layout.StepNumber(e.Name()); step {
			if err := disk.RemoveTree(filepath.Join(folder, e.Name())); err != nil {
				return err
			}
		}
	}
	// Checked here only so that a store can't fill the folder: one that does not
	// count is the last that is got. Root sees it, and judges.
	var failed error
	_, _ = set.Walk(func(n int) ([]byte, error) {
		data, err := store.TrustDocument(ctx, s, n)
		if store.IsNotExist(err) {
			return nil, err
		}
		if failed = err; err != nil {
			failed = outcome.Defer(outcome.Store, "%w", err)
		} else {
			failed = disk.WriteFile(filepath.Join(folder, layout.StepName(n)), data, 0o644)
		}
		return data, failed
	}, nil)
	return failed
}
