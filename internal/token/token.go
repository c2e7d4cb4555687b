// Package token keeps the tokens that a door knows boxes by: made once, printed
// once, and kept as their hashes in the store that the door serves.
package token

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"time"

	"sluice/internal/contract"
	"sluice/internal/store"
)

// Key is where the hashes of the tokens are kept that a store's door knows.
// It has no shape that a door hands out.
const Key = "control/door/tokens.json"

// Limits of tokens.
const (
	maxTokens  = 4 << 20 // bytes of Key
	Size       = 32      // bytes of a token, random
	tokenTries = 5       // of a change that somebody else made as well
)

// Make makes a token for a box and keeps its hash in the store; an earlier
// token of that box counts no more. The token itself is kept nowhere.
func Make(ctx context.Context, s store.Store, label contract.Label, fleet string, now time.Time) (string, error) {
	raw := make([]byte, Size)
	_, _ = rand.Read(raw) // never fails (crypto/rand)
	token := base64.RawURLEncoding.EncodeToString(raw)
	return token, edit(ctx, s, func(t map[contract.Digest]contract.Token) {
		maps.DeleteFunc(t, func(_ contract.Digest, old contract.Token) bool { return old.Label == label && old.Fleet == fleet })
		t[Hash(token)] = contract.Token{Label: label, Fleet: fleet, At: contract.At(now)}
	})
}

// Revoke makes the token of a box count no more. It reports whether there was
// one.
func Revoke(ctx context.Context, s store.Store, label contract.Label, fleet string) (bool, error) {
	found := false
	err := edit(ctx, s, func(t map[contract.Digest]contract.Token) {
		maps.DeleteFunc(t, func(_ contract.Digest, old contract.Token) bool {
			gone := old.Label == label && old.Fleet == fleet
			found = found || gone
			return gone
		})
	})
	return found, err
}

func edit(ctx context.Context, s store.Store, change func(map[contract.Digest]contract.Token)) error {
	var err error
	for range tokenTries {
		tokens, etag, rerr := Read(ctx, s, "")
		if rerr != nil {
			return rerr
		}
		change(tokens.Tokens)
		if len(tokens.Encode()) > maxTokens {
			return fmt.Errorf("%q of %s would be over %d bytes: revoke tokens of boxes that are no more (sluice door token LABEL -revoke)", Key, s, maxTokens)
		}
		if _, err = store.PutBytes(ctx, s, Key, tokens.Encode(), store.Condition{IfMatch: etag, IfNone: etag == ""}); !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
	return err
}

// Read reads the tokens that a store keeps, and their ETag; without any it is "". If
// the ETag is unless, the answer is store.ErrNotModified.
func Read(ctx context.Context, s store.Store, unless string) (contract.Tokens, string, error) {
	none := contract.Tokens{Schema: contract.One, Tokens: map[contract.Digest]contract.Token{}}
	o, err := s.Get(ctx, Key, maxTokens, unless)
	if store.IsNotExist(err) {
		return none, "", nil
	}
	if err != nil {
		return none, unless, err
	}
	t, err := contract.Spoken.DecodeTokens(o.Data, maxTokens)
	if err != nil {
		return none, o.ETag, fmt.Errorf("%q of %s: %w", Key, s, err)
	}
	return t, o.ETag, nil
}

// Hash is what is kept of a token.
func Hash(token string) contract.Digest {
	sum := sha256.Sum256([]byte(token))
	return contract.Digest(hex.EncodeToString(sum[:]))
}

// Form reports whether something can be a token at all.
func Form(s string) bool {
	raw, err := base64.RawURLEncoding.DecodeString(s)
	return err == nil && len(raw) == Size
}
