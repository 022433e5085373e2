package inside

import (
	"fmt"
	"testing"
)

func TestTop(t *testing.T) {
	l := top[int]{n: 3, less: func(a, b int) int { return a - b }}
	for _, v := range []int{5, 1, 9, 5, 7, 2, 9} {
		l.add(v)
	}
	if fmt.Sprint(l.items) != "[9 9 7]" {
		t.Error(l.items)
	}
}
