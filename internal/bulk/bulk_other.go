//go:build !amd64 && !arm64

package bulk

import "hash/crc32"

func has(f form) bool { return f == portable }

func copyBy(_ form, crc uint32, dst, src []byte) uint32 { return copyPortable(crc, dst, src) }

func crcBy(_ form, crc uint32, b []byte) uint32 { return crc32.Update(crc, castagnoli, b) }
