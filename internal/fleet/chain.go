package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// Families are those that a trust document names keys for.
var Families = []contract.Ladder{contract.PointerLadder, contract.TrustLadder}

// A Chain is how far the trust documents of a store lead.
type Chain struct {
	Before trust.Set // the last but one; number 0 if there is none
	Set    trust.Set // the newest
	Data   []byte    // that one, as it is in the store
}

// Walk follows the trust documents of a store from the first. What is returned
// is as far as it came, also with an error. A store without any is ErrNoDeployment.
func Walk(ctx context.Context, s store.Store) (Chain, error) {
	var c Chain
	get := func(n int) ([]byte, error) { return store.TrustDocument(ctx, s, n) }
	data, err := get(1)
	if store.IsNotExist(err) {
		if err := gap(ctx, s, 0); err != nil {
			return c, err
		}
		return c, &outcome.ConfigError{Err: fmt.Errorf("%s is %w", s, ErrNoDeployment)}
	}
	if err != nil {
		return c, err
	}
	first, err := trust.First(data)
	if err != nil {
		return c, err
	}
	if first.Number != 1 {
		return c, outcome.Refuse(outcome.BadSignature, "trust document %d stands where 1 should", first.Number)
	}
	c.Set, c.Data = first, data
	for { // boxes that are new begin with a newer one; here it is all of it
		begun := c.Set.Number
		_, err := c.Set.Walk(get, func(next trust.Set, data []byte) error {
			c = Chain{c.Set, next, data}
			return nil
		})
		if err != nil {
			return c, err
		}
		if c.Set.Number-begun < trust.MaxSteps {
			return c, gap(ctx, s, c.Set.Number)
		}
	}
}

// ErrNoDeployment is a store that nobody has made one.
var ErrNoDeployment = errors.New("no deployment yet: run `sluice init` first")

// gap says that a chain ends although there are documents that its next one would
// lead to.
func gap(ctx context.Context, s store.Store, end int) error {
	keys, err := s.List(ctx, contract.TrustPrefix)
	if err != nil {
		return err
	}
	for _, key := range keys {
		// end+1 may have been published since.
		if n, ok := contract.ParseTrustKey(key); ok && n > end+1 && !slices.Contains(keys, contract.TrustKey(end+1)) {
			return outcome.Config("trust document %d is missing in %s, and %d is there, which it leads to: boxes can't follow; put it back from a copy", end+1, s, n)
		}
	}
	return nil
}

// Trust returns the newest trust document of a store, as far as this build can
// read them.
func Trust(ctx context.Context, s store.Store) (trust.Set, error) {
	chain, err := Walk(ctx, s)
	return chain.Set, err
}
