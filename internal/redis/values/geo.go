package values

import (
	"bytes"
	"math"
	"slices"
	"strconv"

	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/geo"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"geoadd":  cmdGeoAdd,
	"geodist": cmdGeoDist,
	"geohash": cmdGeoHash,
	"geopos":  cmdGeoPos,
})

var _ = severalKeys(map[string]SeveralFunc{
	"georadius":            georadius(geoquery{at: 6}),
	"georadius_ro":         georadius(geoquery{at: 6, readOnly: true}),
	"georadiusbymember":    georadius(geoquery{at: 5, member: true}),
	"georadiusbymember_ro": georadius(geoquery{at: 5, member: true, readOnly: true}),
	"geosearch":            georadius(geoquery{at: 2, search: true}),
	"geosearchstore":       georadius(geoquery{at: 3, search: true, storeFirst: true}),
})

// Positions are sorted sets whose scores package geo makes. Replies, and the order in which arguments are looked at,
// are those of geo.c.

// unitOf is a unit's metres.
func unitOf(b []byte) (metres float64, err error) {
	switch {
	case Fold(b, "m"):
		return 1, nil
	case Fold(b, "km"):
		return 1000, nil
	case Fold(b, "ft"):
		return 0.3048, nil
	case Fold(b, "mi"):
		return 1609.34, nil
	}
	return 0, refusal("ERR unsupported unit provided. please use M, KM, FT, MI")
}

// parsePosition reads longitude and latitude.
// Both are in degrees, and latitudes end at some 85°, as those of web maps do.
func parsePosition(lon, lat []byte) (p geo.Position, err error) {
	var ok1, ok2 bool
	p.Lon, ok1 = scoreOf(lon)
	p.Lat, ok2 = scoreOf(lat)
	switch {
	case !ok1 || !ok2:
		return p, ErrNotFloat
	case !p.Valid():
		return p, refusal("ERR invalid longitude,latitude pair " + cFixed(p.Lon) + "," + cFixed(p.Lat))
	}
	return p, nil
}

// cmdGeoAdd is ZADD with the positions' scores. All positions are read before any is added.
func cmdGeoAdd(k *Key, args [][]byte, w *resp.Writer) error {
	var a zaddArgs
	p := OptionsOf(args[2:])
	for options := true; options; {
		switch {
		case p.Flag("nx"):
			a.nx = true
		case p.Flag("xx"):
			a.xx = true
		case p.Flag("ch"):
			a.ch = true
		default:
			options = false
		}
	}
	if !p.More() || p.Left()%3 != 0 || a.nx && a.xx {
		return ErrSyntax
	}
	for p.More() {
		at, err := parsePosition(p.Str(), p.Str())
		if err != nil {
			return err
		}
		a.scores, a.members = append(a.scores, float64(at.Score())), append(a.members, p.Str())
	}
	return zadd(k, args[1], &a, w)
}

// cmdGeoDist is null if one of the members is not there. Positions have the precision of their score, some metre.
func cmdGeoDist(k *Key, args [][]byte, w *resp.Writer) error {
	unit, err := 1.0, error(nil)
	if len(args) == 5 {
		if unit, err = unitOf(args[4]); err != nil {
			return err
		}
	} else if len(args) > 5 {
		return ErrSyntax
	}
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	a, b := z.Find(args[2]), z.Find(args[3])
	if a < 0 || b < 0 {
		w.Null()
		return nil
	}
	writeDistance(w, geo.Distance(geo.Decode(z.Score(a)), geo.Decode(z.Score(b)))/unit)
	return nil
}

// writeDistance writes four digits behind the point, in whichever unit.
func writeDistance(w *resp.Writer, d float64) { w.BulkString(strconv.FormatFloat(d, 'f', 4, 64)) }

// cmdGeoHash gives the usual geohash, of latitudes up to 90°, and not the one of the score.
func cmdGeoHash(k *Key, args [][]byte, w *resp.Writer) error {
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	w.Array(len(args) - 2)
	for _, at := range z.Places(args[2:]) {
		if at < 0 {
			w.Null()
		} else {
			w.BulkString(geo.Decode(z.Score(at)).Hash())
		}
	}
	return nil
}

// cmdGeoPos gives the middle of each score's cell, and not the position that was added.
func cmdGeoPos(k *Key, args [][]byte, w *resp.Writer) error {
	z, err := k.sortedSet(args[1])
	if err != nil {
		return err
	}
	w.Array(len(args) - 2)
	for _, at := range z.Places(args[2:]) {
		if at < 0 {
			w.NullArray()
		} else {
			writePosition(w, geo.Decode(z.Score(at)))
		}
	}
	return nil
}

// writePosition writes 17 digits without trailing zeros, as Redis does; in RESP3 they are doubles of that text.
func writePosition(w *resp.Writer, p geo.Position) {
	w.Array(2)
	for _, f := range [...]float64{p.Lon, p.Lat} {
		b := bytes.TrimSuffix(bytes.TrimRight(strconv.AppendFloat(nil, f, 'f', 17, 64), "0"), []byte("."))
		if w.Proto == 3 {
			w.Raw(slices.Concat([]byte(","), b, []byte("\r\n")))
		} else {
			w.Bulk(b)
		}
	}
}

// geoquery is what GEORADIUS, GEOSEARCH and their relatives ask for.
// The first fields say which command it is; the others are read from its arguments.
type geoquery struct {
	at         int  // where the options begin
	member     bool // the center is a member
	readOnly   bool // no STORE
	search     bool // center and shape are options
	storeFirst bool // the first argument is where the result goes

	shape                                     geo.Shape // in its own unit
	withDist, withHash, withCoord             bool
	asc, desc, any                            bool   // ANY goes with COUNT
	count                                     int64  // 0: all
	fromMember, fromPosition, byRadius, byBox bool   // which of them were given, for GEOSEARCH
	store                                     []byte // nil: nowhere
	storeDist                                 bool   // distances are the scores, and not positions
}

type geopoint struct {
	collection.ZEntry
	geo.Position
	metres float64 // from the center
}

// georadius makes a command of a query that knows what kind of command it is.
// The key's type is looked at before the arguments. Without the key most mistakes in the arguments are still found.
func georadius(kind geoquery) SeveralFunc {
	return func(t Keys, args [][]byte, w *resp.Writer) error {
		q := kind
		name := args[1]
		if q.storeFirst {
			// Both keys go to the store in one round trip.
			q.store, name = args[1], args[2]
			t.Load(args[1:3]...)
		}
		k := t.Key(name)
		z, err := k.sortedSet(name)
		if err != nil {
			return err
		}
		// A center that is a member needs the set, which is why the key is read before.
		if err := q.parse(args, z, k.Present); err != nil {
			return err
		}
		var found []geopoint
		if k.Present {
			found = q.find(z)
		}
		if q.store == nil {
			q.write(w, found)
			return nil
		}
		list := make([]collection.ZEntry, len(found))
		for i, p := range found {
			if list[i] = p.ZEntry; q.storeDist {
				list[i].Score = p.metres / q.shape.Unit
			}
		}
		if err := t.Key(q.store).storeSortedSet(list); err != nil {
			return err
		}
		w.Int(int64(len(list)))
		return nil
	}
}

// parse reads all arguments.
func (q *geoquery) parse(args [][]byte, z collection.ZSet, present bool) error {
	var err error
	switch {
	case q.search:
	// Without the key there is no member to begin with, and nothing to be found, so Redis does not look at the radius.
	case q.member && present:
		if err = q.fromMemberOf(z, args[2]); err == nil {
			err = q.parseRadius(args[3], args[4])
		}
	case !q.member:
		if q.shape.Center, err = parsePosition(args[2], args[3]); err == nil {
			err = q.parseRadius(args[4], args[5])
		}
	}
	if err != nil {
		return err
	}
	p := OptionsOf(args[q.at:])
	for p.More() {
		q.parseOption(&p, z, present)
	}
	if err := p.End(); err != nil {
		return err
	}
	// Errors repeat the command's name as the client wrote it.
	name := string(args[0])
	switch {
	case q.store != nil && (q.withDist || q.withHash || q.withCoord):
		what := "STORE option in GEORADIUS"
		if q.storeFirst {
			what = "GEOSEARCHSTORE"
		}
		return refusal("ERR " + what + " is not compatible with WITHDIST, WITHHASH and WITHCOORD options")
	case q.search && !q.fromMember && !q.fromPosition:
		return refusal("ERR exactly one of FROMMEMBER or FROMLONLAT can be specified for " + name)
	case q.search && !q.byRadius && !q.byBox:
		return refusal("ERR exactly one of BYRADIUS and BYBOX can be specified for " + name)
	case q.any && q.count == 0:
		return refusal("ERR the ANY argument requires COUNT argument")
	}
	return nil
}

// parseOption reads one option and what belongs to it.
func (q *geoquery) parseOption(p *args.Parser, z collection.ZSet, present bool) {
	stores := !q.readOnly && !q.search
	switch {
	case p.Flag("withdist"):
		q.withDist = true
	case p.Flag("withhash"):
		q.withHash = true
	case p.Flag("withcoord"):
		q.withCoord = true
	case p.Flag("any"):
		q.any = true
	case p.Flag("asc"):
		q.asc, q.desc = true, false
	case p.Flag("desc"):
		q.asc, q.desc = false, true
	case p.Option("count", 1):
		if q.count = p.Int(); q.count <= 0 {
			p.Refuse("ERR COUNT must be > 0")
		}
	// The result goes to the key of the last such option.
	case stores && p.Option("store", 1):
		q.store, q.storeDist = p.Str(), false
	case stores && p.Option("storedist", 1):
		q.store, q.storeDist = p.Str(), true
	case q.storeFirst && p.Flag("storedist"):
		q.storeDist = true
	case q.search:
		q.parseShape(p, z, present)
	default:
		p.Wrong()
	}
}

// parseShape reads the options that GEOSEARCH has for center and shape.
func (q *geoquery) parseShape(p *args.Parser, z collection.ZSet, present bool) {
	var err error
	switch {
	case !q.fromPosition && p.Option("frommember", 1):
		member := p.Str()
		if q.fromMember = true; present {
			err = q.fromMemberOf(z, member)
		}
	case !q.fromMember && p.Option("fromlonlat", 2):
		q.fromPosition = true
		q.shape.Center, err = parsePosition(p.Str(), p.Str())
	case !q.byBox && p.Option("byradius", 2):
		q.byRadius = true
		err = q.parseRadius(p.Str(), p.Str())
	case !q.byRadius && p.Option("bybox", 3):
		q.byBox, q.shape.Box = true, true
		err = q.parseBox(p.Str(), p.Str(), p.Str())
	default:
		p.Wrong()
	}
	p.Fail(err)
}

func (q *geoquery) parseBox(width, height, unit []byte) error {
	var ok bool
	if q.shape.Width, ok = scoreOf(width); !ok {
		return refusal("ERR need numeric width")
	}
	if q.shape.Height, ok = scoreOf(height); !ok {
		return refusal("ERR need numeric height")
	}
	if q.shape.Height < 0 || q.shape.Width < 0 {
		return refusal("ERR height or width cannot be negative")
	}
	var err error
	q.shape.Unit, err = unitOf(unit)
	return err
}

// fromMemberOf makes a member the center.
// The member itself is found, too, at distance 0.
func (q *geoquery) fromMemberOf(z collection.ZSet, member []byte) error {
	at := z.Find(member)
	if at < 0 {
		return refusal("ERR could not decode requested zset member")
	}
	q.shape.Center = geo.Decode(z.Score(at))
	return nil
}

func (q *geoquery) parseRadius(radius, unit []byte) error {
	var ok bool
	if q.shape.Radius, ok = scoreOf(radius); !ok {
		return refusal("ERR need numeric radius")
	}
	if q.shape.Radius < 0 {
		return refusal("ERR radius cannot be negative")
	}
	var err error
	q.shape.Unit, err = unitOf(unit)
	return err
}

// find looks for the members within the shape, in the order that is asked for. With ANY the first ones do.
// Only the ranges of scores that the shape may reach are looked at. Members refer to the set.
func (q *geoquery) find(z collection.ZSet) (found []geopoint) {
	// With ANY the first members that are found do, which need not be the nearest.
	enough := func() bool { return q.any && q.count > 0 && int64(len(found)) >= q.count }
	for _, r := range q.shape.Ranges() {
		for i := z.SearchScore(r.Min, false); i < z.Len() && z.Score(i) < r.Max && !enough(); i++ {
			// A range of scores has corners that are outside of the shape.
			p := geo.Decode(z.Score(i))
			if metres, ok := q.shape.Contains(p); ok {
				found = append(found, geopoint{z.Entry(i), p, metres})
			}
		}
	}
	nearer := func(a, b geopoint) int {
		switch {
		case a.metres < b.metres:
			return -1
		case a.metres > b.metres:
			return 1
		}
		return 0
	}
	switch {
	case q.desc:
		slices.SortStableFunc(found, func(a, b geopoint) int { return nearer(b, a) })
	// A COUNT without an order asks for the nearest.
	case q.asc, q.count > 0 && !q.any:
		slices.SortStableFunc(found, nearer)
	}
	if q.count > 0 {
		found = found[:min(q.count, int64(len(found)))]
	}
	return found
}

// write replies with what was found.
// A member is by itself without options, and the first element of an array with them.
func (q *geoquery) write(w *resp.Writer, found []geopoint) {
	more := int(Bit(q.withDist) + Bit(q.withHash) + Bit(q.withCoord))
	w.Array(len(found))
	for _, p := range found {
		if more > 0 {
			w.Array(1 + more)
		}
		w.Bulk(p.Member)
		if q.withDist {
			writeDistance(w, p.metres/q.shape.Unit)
		}
		if q.withHash {
			w.Int(int64(p.ZEntry.Score))
		}
		if q.withCoord {
			writePosition(w, p.Position)
		}
	}
}

// cFixed is f as C's %f writes it.
// It is for an error text.
func cFixed(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	case math.IsNaN(f):
		return "nan"
	}
	return strconv.FormatFloat(f, 'f', 6, 64)
}
