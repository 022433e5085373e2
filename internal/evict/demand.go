package evict

// Demand is what is known of a session's need for memory in one placement group of a full
// cache.
type Demand struct {
	Held         uint64  // units granted to it
	Share        uint64  // units that are its fair share; 0: not known
	Rate         float64 // units it takes a second
	LimboSeconds float64 // until what it evicts now is free
	Slack        float64 // share of its memory that is to be free, so that some is in one piece
	Need         uint32  // units of the largest place that could not be had lately
	// Starving: operations wait for memory. How much they would take is not known then: the
	// rate is of what they got.
	Starving bool
}

const (
	// SupplyShare of a session's memory is kept at hand.
	SupplyShare = 1.0 / 32
	// MinSupply is the least that is kept at hand, units.
	MinSupply = 256
	// firstSupply is what a session that holds less than its share has at hand at first,
	// units, if its share allows.
	firstSupply = 1 << 14
)

// Supply is how many units, free or in limbo, will last until more comes out of limbo.
//
// It is not more than a third of all. If records come faster than limbo gives places back, writers wait, but what
// they wrote stays a while. Fewer operations want less memory at hand, and find less of it in one piece, which
// makes them fewer still: Slack leads out of that. And a session that holds less than its share measures itself by
// that: by what it holds it would be given nothing to begin with.
func (d *Demand) Supply() int64 {
	turnover := d.Rate * d.LimboSeconds
	all := float64(max(d.Held, d.Share))
	supply := min(1.25*turnover, all/3)
	least := all * max(SupplyShare, d.Slack)
	if d.young() {
		least = max(float64(d.Held)*max(SupplyShare, d.Slack), min(least, max(firstSupply, 2*turnover)))
		if d.Starving {
			supply = max(supply, min(2*turnover, all/3), min(firstSupply, all/8))
		}
	}
	return max(int64(supply), int64(least), MinSupply, 2*int64(d.Need))
}

// Foreign is how many units of free places of one length, which others were granted, the session can use. It is one
// in oneIn of its memory. While the session has no memory of its own it is all of its supply.
func (d *Demand) Foreign(oneIn uint64) uint64 {
	stock := max(max(d.Held, d.Share)/oneIn, MinSupply)
	if d.young() {
		stock = max(stock, uint64(float64(d.Supply())*(1-float64(d.Held)/float64(d.Share))))
	}
	return stock
}

// young reports whether the session has not come to its share yet.
func (d *Demand) young() bool { return d.Held < d.Share }
