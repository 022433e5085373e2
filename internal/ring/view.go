package ring

import "encoding/binary"

// Part is some bytes of a region.
type Part struct{ Offset, Length uint64 }

// MaxParts is how many parts a View has at most: those that fit into a slot.
const MaxParts = SlotSize / 16

// PutParts writes the parts of a View to a slot: MaxParts at most.
func PutParts(slot []byte, parts []Part) {
	for i, p := range parts {
		binary.LittleEndian.PutUint64(slot[16*i:], p.Offset)
		binary.LittleEndian.PutUint64(slot[16*i+8:], p.Length)
	}
}

// ParseParts reads the parts of a View of n bytes from a copy of a slot. None of them is empty.
func ParseParts(slot []byte, n uint64) (parts []Part, err error) {
	for n > 0 {
		if len(parts) == MaxParts {
			return nil, protocolError("a View has more than %d parts", MaxParts)
		}
		at := slot[16*len(parts):]
		p := Part{binary.LittleEndian.Uint64(at), binary.LittleEndian.Uint64(at[8:])}
		if p.Length == 0 || p.Length > n {
			return nil, protocolError("a part of %d bytes in a View that has %d more", p.Length, n)
		}
		parts, n = append(parts, p), n-p.Length
	}
	return parts, nil
}
