package fsm

import (
	"bytes"
	"errors"
	"fmt"
	"math"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// KeyBytes is the length of a key that signs session tokens.
const KeyBytes = 32

// KeyGeneration is that of the present key for session tokens, 1 for the first.
func (s *State) KeyGeneration() uint32 { return max(s.meta.KeyGeneration, 1) }

// Keys are those whose session tokens are taken: the present one, then the one before if there is one.
func (s *State) Keys() []*dirpb.TokenKey {
	keys := []*dirpb.TokenKey{{Generation: s.KeyGeneration(), Key: s.meta.ClusterKey}}
	if len(s.meta.PreviousKey) > 0 {
		keys = append(keys, &dirpb.TokenKey{Generation: s.KeyGeneration() - 1, Key: s.meta.PreviousKey})
	}
	return keys
}

// rotateKey replaces the key for session tokens. The tokens of the one before it are good for nothing from
// here on: that nobody shows one any more is the leader's to know.
func (s *State) rotateKey(c *fsmpb.RotateKey) error {
	now := s.KeyGeneration()
	switch {
	case s.meta.ClusterId == "":
		return fmt.Errorf("%w: there is no cluster yet, and so no key", ErrRefused)
	case now == math.MaxUint32:
		return fmt.Errorf("%w: every generation of the key has been used", ErrFull)
	case c.GetGeneration() != now+1:
		return fmt.Errorf("%w: key generation %d does not follow %d, the present one: somebody made another key "+
			"meanwhile", ErrRefused, c.GetGeneration(), now)
	case len(c.Key) != KeyBytes:
		return fmt.Errorf("%w: a key of %d bytes, want %d", ErrInvalid, len(c.Key), KeyBytes)
	case bytes.Equal(c.Key, s.meta.ClusterKey) || bytes.Equal(c.Key, s.meta.PreviousKey):
		return fmt.Errorf("%w: the key is one that was there", ErrInvalid)
	}
	m := s.editMeta()
	m.PreviousKey, m.ClusterKey = m.ClusterKey, c.Key
	m.KeyGeneration, m.KeyUnixMillis = c.Generation, c.UnixMillis
	return nil
}

func (s *State) checkKeys() error {
	m := s.meta
	switch {
	case (m.ClusterId == "") != (len(m.ClusterKey) == 0):
		return fmt.Errorf("cluster %q has a key of %d bytes", m.ClusterId, len(m.ClusterKey))
	case (s.KeyGeneration() > 1) != (len(m.PreviousKey) > 0):
		return fmt.Errorf("a key of generation %d follows one of %d bytes", s.KeyGeneration(), len(m.PreviousKey))
	case len(m.PreviousKey) > 0 && bytes.Equal(m.PreviousKey, m.ClusterKey):
		return errors.New("the key is the same as the one before")
	}
	return nil
}
