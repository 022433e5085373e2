// Package units writes amounts of memory for people: in errors, logs and tables.
//
// It leaves to its callers what is counted. [Bytes] and [Rounded] are all of it; they may be called concurrently.
package units

import (
	"fmt"
	"strconv"
)

// Bytes is n in the largest unit in which a decimal says enough: "64 MiB" is exact, and "64.3 MiB" is rounded. An
// amount that would only seem to be a whole number has a smaller unit, which tells it from a limit below it.
func Bytes[T ~int | ~int64 | ~uint32 | ~uint64](n T) string {
	if n < 0 {
		return fmt.Sprintf("%d bytes", n)
	}
	v := uint64(n)
	for unit := len(names) - 1; unit >= 0; unit-- {
		size := uint64(1) << (10 * (unit + 1))
		whole, rest := v/size, v%size
		if whole == 0 {
			continue
		}
		if rest == 0 {
			return fmt.Sprintf("%d %s", whole, names[unit])
		}
		if tenth := (rest*10 + size/2) / size; tenth > 0 && tenth < 10 {
			return fmt.Sprintf("%d.%d %s", whole, tenth, names[unit])
		}
	}
	if v == 1 {
		return "1 byte"
	}
	return fmt.Sprintf("%d bytes", v)
}

// Rounded is n with a decimal in the largest unit in which it is at least 1, for columns: "64.0 MiB", "512 B".
func Rounded[T ~int | ~int64 | ~uint64](n T) string {
	v, unit := float64(n), 0
	for v >= 1024 && unit < len(names) {
		v /= 1024
		unit++
	}
	if unit == 0 {
		return strconv.FormatInt(int64(n), 10) + " B"
	}
	return strconv.FormatFloat(v, 'f', 1, 64) + " " + names[unit-1]
}

var names = [...]string{"KiB", "MiB", "GiB", "TiB"}
