package memnode

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/keeper"
)

// Memory of an earlier process that this one cannot use is kept aside: the items have other names, which begin with
// rescueItems, and nobody here looks at them. There is one such set at most. It counts as memory that the node lends,
// and gives way to regions.

// countRescued notes what an earlier process has kept aside.
func (n *Node) countRescued(items []*keeper.Item) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.rescued, n.mu.rescuedBytes = nil, 0
	for _, i := range items {
		if strings.HasPrefix(i.Name, rescueItems) {
			n.mu.rescued = append(n.mu.rescued, i.Name)
			n.mu.rescuedBytes += bytesOf(i)
		}
	}
}

// bytesOf is what an item takes of the memory that is lent. A state is beside that.
func bytesOf(i *keeper.Item) (sum int64) {
	if strings.HasSuffix(i.Name, stateItem) {
		return 0
	}
	for _, fd := range i.FDs {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil { // else it takes none
			sum += st.Size
		}
	}
	return sum
}

// keepAside renames the items of memory that cannot be used, in the place of what was kept aside before. False: it is
// to be given up.
func (n *Node) keepAside(why Kept) bool {
	items, err := n.o.Keeper.List()
	var aside []*keeper.Item
	regions := 0
	for _, i := range items {
		defer i.Close()
		isRegion := strings.HasPrefix(i.Name, RegionItems)
		if isRegion {
			regions++
		}
		if isRegion || i.Name == stateItem {
			aside = append(aside, i)
		}
	}
	if err != nil || regions == 0 {
		return false // who calls finds out why, or there is no memory
	}
	n.dropRescued("other memory is kept aside")
	var where string
	var done []string
	var bytes int64
	for _, i := range aside {
		to := rescueItems + i.Name
		at, err := n.o.Keeper.Rename(i.Name, to)
		if err != nil {
			n.log.Error("memory that cannot be used cannot be kept aside either", "item", i.Name, "err", err)
			continue
		}
		where = at
		done, bytes = append(done, to), bytes+bytesOf(i)
	}
	n.mu.Lock()
	n.mu.rescued, n.mu.rescuedBytes = done, bytes
	n.mu.Unlock()
	n.log.Warn("memory that cannot be used is kept aside for rescue, until a region wants its room, other memory is "+
		"kept aside or the memory node is told to end",
		"reason", why.String(), "items", done, "bytes", bytes, "last_at", where)
	return true
}

// dropRescued gives back what was kept aside, and reports whether there was anything.
func (n *Node) dropRescued(why string) bool {
	n.mu.Lock()
	items, bytes := n.mu.rescued, n.mu.rescuedBytes
	n.mu.rescued, n.mu.rescuedBytes = nil, 0
	n.mu.Unlock()
	if len(items) == 0 {
		return false
	}
	var errs []error
	for _, name := range items {
		errs = append(errs, n.o.Keeper.Drop(name))
	}
	// It fails for items that somebody has removed.
	n.log.Warn("memory that was kept aside for rescue is given up", "why", why, "items", items, "bytes", bytes, "err",
		errors.Join(errs...))
	return true
}

// makeRoom gives back what was kept aside if a region of so many bytes does not fit beside it.
func (n *Node) makeRoom(size uint64) {
	n.mu.Lock()
	lacks := size > uint64(max(n.o.CapacityBytes-n.mu.used-n.mu.rescuedBytes, 0))
	n.mu.Unlock()
	if lacks {
		n.dropRescued("a region wants its room")
	}
}
