// Package peerspb is the contract of internal/peers, which says what it means. Its code is generated from peers.proto.
package peerspb
