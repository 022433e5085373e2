package memcached

// SetCalm sets how often in a row a client is to say little before its connection enters a loop.
func (s *Server) SetCalm(n int) { s.calm = n }

// Looped is how many connections are in loops.
func (s *Server) Looped() int { return s.loops.Conns() }

// Version is what clients are told.
const Version = version
