package session

// Term is the greatest that the directory has shown.
func (a *Agenda) Term() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.term
}
