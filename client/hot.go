package client

import (
	"math/rand/v2"

	"github.com/kvd-project/kvd/internal/hotkeys"
)

// HotKey is a key that this Client has used much. Share is its part of the uses of all keys lately, and Least the least
// that this can be. Both are from 0 to 1, as a sample tells them.
type HotKey struct {
	Key          string // at most its first 128 bytes
	Share, Least float64
}

// HotKeys estimates the keys that this Client uses most, the most used one first. There are none unless
// [Options].HotKeys says so. A sample of the uses is counted, 1 in 256, successful or not. A use of half a minute ago
// counts half. The estimate takes 30 KiB. It may be called concurrently with everything.
func (c *Client) HotKeys() (all []HotKey) {
	for _, k := range c.hot.All() {
		all = append(all, HotKey{k.Key, k.Share, k.Least})
	}
	return all
}

// countHot counts a use if it is in the sample.
func (c *Client) countHot(key []byte) {
	if rand.Uint32N(hotkeys.Every) == 0 {
		c.hot.Add(0, key)
	}
}
