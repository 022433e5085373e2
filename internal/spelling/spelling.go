// Package spelling finds what somebody meant to type, for command lines, files of settings and the
// environment alike.
//
// It leaves to its callers which names there are. [Near] is all of it; it may be called concurrently and keeps
// nothing of its arguments.
package spelling

import (
	"slices"
	"strings"
)

// Most is how many names Near gives at most.
const Most = 3

// Near gives those of names that differ least from typed, in their order. A letter that is missing, added or another
// one, and two neighbours that changed places, count as one mistake. There may be one for each three letters, but no
// more than three, and one in a short name. Capitals do not count.
func Near(typed string, names []string) []string {
	word := strings.ToLower(typed)
	best := min(max(len(word)/3, 1), 3)
	var near []string
	for _, name := range names {
		if len(word) == 0 || abs(len(name)-len(word)) > best {
			continue
		}
		d := mistakes(word, strings.ToLower(name))
		if d < best {
			best, near = d, nil
		}
		if d == best && !slices.Contains(near, name) {
			near = append(near, name)
		}
	}
	return near[:min(len(near), Most)]
}

// DidYouMean asks for what is near, for the end of a message; it is empty if nothing is.
func DidYouMean(near []string) string {
	if len(near) == 0 {
		return ""
	}
	return "; did you mean " + strings.Join(near, " or ") + "?"
}

func abs(n int) int { return max(n, -n) }

// mistakes is the distance of Damerau and Levenshtein in which no part is changed twice.
func mistakes(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j]+cost, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
