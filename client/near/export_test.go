package near

// Flights is how many reads of the store are under way or to begin.
func (c *Cache) Flights() (n int) {
	for i := range c.stripes {
		s := &c.stripes[i]
		s.Lock()
		n += len(s.flights)
		s.Unlock()
	}
	return n
}
