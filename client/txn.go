package client

import "context"

// MultiCAS performs ops, which put, delete or keep a key each, in one step: either all of it happens or nothing does (the
// multi-word compare-and-swap of Harris, Fraser and Pratt, DISC'02). No key may be there twice, and at most MaxTxnKeys of them.
//
// Each Op's Cond must hold at that instant. If one does not hold nothing is done: that Op has the Err that a Put would have
// (ErrConflict, ErrExists, ErrNotFound; other Ops may have one, too), and the error wraps it and names the key. An OpDelete or an OpKeep
// without condition does not mind whether the key is there. When all is done each Op's Item has the Version that its key has, 0: none.
// Other errors: ErrTxnTooLarge, ErrTxnContended (others kept it from happening until the OpTimeout), or those of a Put;
// Outcome tells whether it happened.
func (c *Client) MultiCAS(ctx context.Context, ops []Op) error { panic("soon") }
