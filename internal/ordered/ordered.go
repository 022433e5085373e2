// Package ordered gives maps in the order of their keys, and sorts what is seldom sorted. The order is for
// state machines that have to do the same thing everywhere.
package ordered

import (
	"cmp"
	"iter"
	"slices"
	"sort"
)

// Keys are a map's keys, ascending; nil of an empty map, without an allocation.
func Keys[K cmp.Ordered, V any](m map[K]V) []K {
	if len(m) == 0 {
		return nil
	}
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Values are a map's values in the order of their keys; nil of an empty map, without an allocation.
func Values[K cmp.Ordered, V any](m map[K]V) []V {
	if len(m) == 0 {
		return nil
	}
	out := make([]V, 0, len(m))
	for _, k := range Keys(m) {
		out = append(out, m[k])
	}
	return out
}

// All are a map's keys and values in the order of the keys. Keys that are added meanwhile are left out, and the
// values of those that are deleted meanwhile are zero.
func All[K cmp.Ordered, V any](m map[K]V) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, k := range Keys(m) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

// Sort sorts as slices.SortFunc does, in three times the time (1,000 structs of 24 bytes: 112 and 39 µs). That is
// compiled anew for each type of struct, 13 KB of kvd each; this is not. It is for lists that are short or seldom
// sorted.
func Sort[T any](s []T, compare func(a, b T) int) {
	sort.Slice(s, func(i, j int) bool { return compare(s[i], s[j]) < 0 })
}
