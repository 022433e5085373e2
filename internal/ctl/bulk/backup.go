package bulk

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/units"
)

// typeNamed is the type that String gives that name.
func typeNamed(name string) (client.Type, error) {
	for t := client.Plain; t <= client.Stream; t++ {
		if t.String() == name {
			return t, nil
		}
	}
	return 0, fmt.Errorf("type %.40q: want string, hash, set, zset, list or stream", name)
}

// CheckItem refuses a value that is none of its type, as a damaged file may have it: gateways could not serve it.
func CheckItem(t client.Type, value []byte) error {
	n, err := 0, error(nil)
	switch t {
	case client.Plain:
		return nil
	case client.Hash:
		n, err = collection.Hash(value).Len()
	case client.Set:
		n, err = collection.Set(value).Len()
	case client.SortedSet:
		var z collection.ZSet
		z, err = collection.ParseZSet(value)
		n = z.Len()
	case client.List:
		for off := collection.ListStart; off < len(value) && err == nil; n++ {
			_, off, err = collection.ListNext(value, off)
		}
		if known, e := collection.ListLen(value); err == nil && (e != nil || known != n) {
			err = collection.ErrCorrupt
		}
	case client.Stream:
		var s *collection.Stream
		if s, err = collection.ParseStream(value); err == nil {
			err = s.Range(collection.StreamID{}, collection.MaxStreamID, false, func(collection.StreamEntry) bool {
				return true
			})
		}
		n = len(value) // it may have no entries
	}
	switch {
	case err != nil || n == 0:
		return fmt.Errorf("value of %s is no %v as gateways store it", units.Bytes(len(value)), t)
	case len(value) > collection.MaxLen:
		return fmt.Errorf("%v of %s, at most %s", t, units.Bytes(len(value)), units.Bytes(collection.MaxLen))
	}
	return nil
}

// expiry is a time as when prints it, whose year may have more than four digits: RFC 3339 has no such.
type expiry struct{ time.Time }

// The Gregorian calendar begins anew after 400 years.
const (
	cycleYears  = 400
	cycleMillis = 146097 * 24 * 60 * 60 * 1000
)

func (e *expiry) UnmarshalJSON(b []byte) error {
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	year, rest, _ := strings.Cut(text, "-")
	n, err := strconv.Atoi(year)
	if err != nil || n < 10000 {
		e.Time, err = time.Parse(time.RFC3339, text)
		return err
	}
	t, err := time.Parse(time.RFC3339, fmt.Sprintf("%04d-%s", 2000+n%cycleYears, rest))
	if err != nil {
		return err
	}
	ms, cycles := t.UnixMilli(), int64(n/cycleYears-2000/cycleYears)
	if cycles > (math.MaxInt64-ms)/cycleMillis {
		return fmt.Errorf("time %.40q: out of range", text)
	}
	e.Time = time.UnixMilli(ms + cycles*cycleMillis)
	return nil
}

// checkText refuses a line in which bytes are missing: a JSON decoder takes U+FFFD for what is no text.
func checkText(line []byte, texts ...*string) error {
	if !utf8.Valid(line) {
		return errors.New("the line is no UTF-8: key_base64 and value_base64 take any bytes")
	}
	const replaced = "\ufffd"
	got := 0
	for _, s := range texts {
		if s != nil {
			got += strings.Count(*s, replaced)
		}
	}
	if got == 0 {
		return nil
	}
	raw := string(line)
	if got > strings.Count(raw, replaced)+strings.Count(strings.ToLower(raw), `\ufffd`) {
		return errors.New(`half of a surrogate pair, such as \ud800, is no text: key_base64 and value_base64 take any bytes`)
	}
	return nil
}
