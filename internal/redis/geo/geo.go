// Package geo does the arithmetic of Redis's GEO commands. It gives positions as scores of 52 bits, distances, and the
// ranges of scores in which the positions near a place are. Results are Redis's, to the last bit of a score. Distances
// are within an ulp or two of Redis's, since sine and cosine of C's library round otherwise than Go's.
//
// It leaves sorted sets to its caller. Start with [Position] and [Shape]. Everything is a plain value, and may be used
// concurrently. The idea, and all that looks odd, is from geohash.c and geohash_helper.c.
package geo

import "math"

// Limits of positions, in degrees: those of the Web Mercator projection.
const (
	MaxLon = 180
	MaxLat = 85.05112878
)

// steps is how many times a score halves each axis.
const steps = 26

const earthRadius = 6372797.560856 // metres

// Position is a place on the earth, in degrees.
type Position struct{ Lon, Lat float64 }

// Valid reports whether a position has a score.
func (p Position) Valid() bool {
	return p.Lon >= -MaxLon && p.Lon <= MaxLon && p.Lat >= -MaxLat && p.Lat <= MaxLat
}

// Score is the position's geohash of 52 bits, as an integer; p is Valid.
func (p Position) Score() uint64 { return cellAt(p, MaxLat, steps).bits }

// Decode is the middle of the cell that a score stands for. Any number gives some valid position.
func Decode(score float64) Position {
	a := cell{bitsOf(score), steps}.area()
	mid := func(lo, hi, limit float64) float64 { return max(-limit, min(limit, (lo+hi)/2)) }
	return Position{mid(a.lon0, a.lon1, MaxLon), mid(a.lat0, a.lat1, MaxLat)}
}

// bitsOf is a score as an integer. Those that are none of Score's are what a C compiler makes of them on x86-64, as
// Redis has them there.
func bitsOf(score float64) uint64 {
	switch {
	case score >= 1<<64 || math.IsNaN(score):
		return 0
	case score >= 1<<63:
		return uint64(int64(score-1<<63)) ^ 1<<63
	case score < -1<<63:
		return 1 << 63
	}
	return uint64(int64(score))
}

// Hash is the usual geohash of a position in eleven letters; of the last one there are no bits, and it is 0.
func (p Position) Hash() string {
	const letters = "0123456789bcdefghjkmnpqrstuvwxyz"
	bits := cellAt(p, 90, steps).bits
	out := make([]byte, 11)
	for i := range out {
		out[i] = '0'
		if i < 10 {
			out[i] = letters[bits>>(52-(i+1)*5)&0x1f]
		}
	}
	return string(out)
}

func radians(degrees float64) float64 { return degrees * (math.Pi / 180) }
func degrees(radians float64) float64 { return radians / (math.Pi / 180) }

// Distance is the length of the great circle between two positions in metres, by the haversine formula. The products
// are rounded one by one, as on a machine that cannot multiply and add in one step.
func Distance(a, b Position) float64 {
	v := math.Sin((radians(b.Lon) - radians(a.Lon)) / 2)
	if v == 0 {
		return latDistance(a.Lat, b.Lat)
	}
	lat1, lat2 := radians(a.Lat), radians(b.Lat)
	u := math.Sin((lat2 - lat1) / 2)
	h := float64(u*u) + float64(float64(math.Cos(lat1)*math.Cos(lat2))*v)*v
	return 2 * earthRadius * math.Asin(math.Sqrt(h))
}

func latDistance(a, b float64) float64 {
	return earthRadius * math.Abs(radians(b)-radians(a))
}

// cell is one of the 4^step parts of the map. Its bits are those of the two axes in turn, latitude in the even ones.
type cell struct {
	bits uint64
	step int
}

const (
	latBits = 0x5555555555555555
	lonBits = 0xaaaaaaaaaaaaaaaa
)

// cellAt is the cell of a position, where latitudes go from -maxLat to maxLat.
func cellAt(p Position, maxLat float64, step int) cell {
	scale := float64(uint64(1) << step)
	lat := (p.Lat + maxLat) / (maxLat + maxLat) * scale
	lon := (p.Lon + MaxLon) / (MaxLon + MaxLon) * scale
	return cell{spread(uint32(lat)) | spread(uint32(lon))<<1, step}
}

// spread puts the bits of n in the even places.
func spread(n uint32) uint64 {
	x := uint64(n)
	for _, s := range [...]struct {
		shift int
		mask  uint64
	}{{16, 0x0000ffff0000ffff}, {8, 0x00ff00ff00ff00ff}, {4, 0x0f0f0f0f0f0f0f0f}, {2, 0x3333333333333333},
		{1, latBits}} {
		x = (x | x<<s.shift) & s.mask
	}
	return x
}

// gather takes the bits in the even places together.
func gather(x uint64) uint32 {
	x &= latBits
	for _, s := range [...]struct {
		shift int
		mask  uint64
	}{{1, 0x3333333333333333}, {2, 0x0f0f0f0f0f0f0f0f}, {4, 0x00ff00ff00ff00ff}, {8, 0x0000ffff0000ffff},
		{16, 0x00000000ffffffff}} {
		x = (x | x>>s.shift) & s.mask
	}
	return uint32(x)
}

// area is where a cell lies, in degrees.
type area struct{ lon0, lon1, lat0, lat1 float64 }

func (c cell) area() area {
	scale := float64(uint64(1) << c.step)
	edge := func(i float64, limit float64) float64 { return -limit + float64(i/scale*(limit+limit)) }
	lat, lon := float64(gather(c.bits)), float64(gather(c.bits>>1))
	return area{edge(lon, MaxLon), edge(lon+1, MaxLon), edge(lat, MaxLat), edge(lat+1, MaxLat)}
}

// move is the cell so many to the east and to the north; east of the last one is the first.
func (c cell) move(east, north int) cell {
	c.bits = c.moveAxis(lonBits, latBits, east)
	c.bits = c.moveAxis(latBits, lonBits, north)
	return c
}

// moveAxis counts in the bits of one axis, with those of the other all set or all clear so that carries pass over them.
func (c cell) moveAxis(own, other uint64, by int) uint64 {
	shift := 64 - 2*c.step
	x, rest, fill := c.bits&own, c.bits&other, other>>shift
	switch {
	case by > 0:
		x += fill + 1
	case by < 0:
		x = (x | fill) - (fill + 1)
	default:
		return c.bits
	}
	return x&(own>>shift) | rest
}

// Range is the scores from Min up to but not including Max.
type Range struct{ Min, Max float64 }

func (c cell) scores() Range {
	shift := 52 - 2*c.step
	return Range{float64(c.bits << shift), float64((c.bits + 1) << shift)}
}

// Shape is a circle, or a box whose edges go east and north.
type Shape struct {
	Center        Position
	Box           bool
	Radius        float64 // of a circle, in units
	Width, Height float64 // of a box, in units
	Unit          float64 // metres
}

// Contains reports whether a position is within the shape, and how many metres it is from the center if so.
func (s *Shape) Contains(p Position) (metres float64, ok bool) {
	if !s.Box {
		d := Distance(s.Center, p)
		return d, !(d > s.Radius*s.Unit)
	}
	if latDistance(p.Lat, s.Center.Lat) > s.Height*s.Unit/2 {
		return 0, false
	}
	if Distance(p, Position{s.Center.Lon, p.Lat}) > s.Width*s.Unit/2 {
		return 0, false
	}
	return Distance(s.Center, p), true
}

// bounds is the shape's bounding box. Boxes are wider at the edge that is nearer to a pole.
func (s *Shape) bounds() area {
	height, width := s.Unit*s.Height/2, s.Unit*s.Width/2
	if !s.Box {
		height, width = s.Unit*s.Radius, s.Unit*s.Radius
	}
	dLat := degrees(height / earthRadius)
	edge := s.Center.Lat + dLat
	if s.Center.Lat < 0 {
		edge = s.Center.Lat - dLat
	}
	dLon := degrees(width / earthRadius / math.Cos(radians(edge)))
	return area{s.Center.Lon - dLon, s.Center.Lon + dLon, s.Center.Lat - dLat, s.Center.Lat + dLat}
}

// stepFor is how often to halve the map so that a cell and those around it cover a circle.
func stepFor(metres, lat float64) int {
	const mercator = 20037726.37
	if metres == 0 {
		return steps
	}
	step := 1
	for metres < mercator {
		metres *= 2
		step++
	}
	step -= 2
	if lat > 66 || lat < -66 { // cells are narrower towards the poles
		if step--; lat > 80 || lat < -80 {
			step--
		}
	}
	return max(1, min(steps, step))
}

// Ranges are the scores of a shape's cell and of those around it that the shape may reach. They stand in the order in
// which Redis looks at them. Positions in them may be outside of the shape, and for shapes of half the earth a range
// may come twice, as in Redis.
func (s *Shape) Ranges() []Range {
	metres := s.Radius
	if s.Box {
		metres = math.Sqrt(float64(s.Width/2*(s.Width/2)) + float64(s.Height/2*(s.Height/2)))
	}
	metres *= s.Unit
	c := cellAt(s.Center, MaxLat, stepFor(metres, s.Center.Lat))
	b := s.bounds()
	if c.step > 1 && s.leaves(c, b) {
		c = cellAt(s.Center, MaxLat, c.step-1)
	}
	a := c.area()
	var out []Range
	last := cell{step: -1}
	for _, d := range [...]struct{ east, north int }{{0, 0}, {0, 1}, {0, -1}, {1, 0}, {-1, 0}, {1, 1}, {-1, 1}, {1, -1},
		{-1, -1}} {
		if c.step >= 2 && (d.north < 0 && a.lat0 < b.lat0 || d.north > 0 && a.lat1 > b.lat1 ||
			d.east < 0 && a.lon0 < b.lon0 || d.east > 0 && a.lon1 > b.lon1) {
			continue
		}
		n := c.move(d.east, d.north)
		if n == last {
			continue
		}
		if out = append(out, n.scores()); len(out) > 1 { // Redis does not compare with the middle
			last = n
		}
	}
	return out
}

// leaves reports whether the shape, in its bounding box, reaches beyond the cells around c.
func (s *Shape) leaves(c cell, b area) bool {
	return c.move(0, 1).area().lat1 < b.lat1 || c.move(0, -1).area().lat0 > b.lat0 ||
		c.move(1, 0).area().lon1 < b.lon1 || c.move(-1, 0).area().lon0 > b.lon0
}
