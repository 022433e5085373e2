package dirpb

// ChildSegments is how many segments the array has that the shard moves into: the number of
// its own, or a multiple. 0: it does not move.
func (x *Shard) ChildSegments() uint32 {
	switch mv := x.GetMove(); {
	case mv == nil:
		return 0
	case mv.GetSegments() != 0:
		return mv.GetSegments()
	}
	return x.GetSegments()
}
