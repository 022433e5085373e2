// Package e2e tests the store as its users meet it, by the commands kvd and
// kvctl. They are built and run as processes of their own, killed and started
// again.
//
// It holds tests alone and leaves what a package can prove by itself to that
// package. Start with TestStore.
package e2e
