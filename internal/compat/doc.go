// Package compat proves that programs written for Redis and memcached work against
// the gateway. These are those servers' own tools, the client libraries that
// people use, unmodified, and test suites that others wrote for the servers.
//
// It holds tests alone and leaves the exact bytes of each reply to internal/gateway and
// internal/memcached. The tests run when KVD_COMPAT is set (`make test-compat`, which also runs
// install.sh). Start with lab, which runs the processes: a store and its gateways as users start them,
// and a redis-server and a memcached beside them. Every check has to pass on the latter, too. Failures
// of other people's suites, and of applications, are listed in testdata/expected with their reason.
// Applications (testdata/applications) are libraries that use Redis or memcached, each with a script
// that does what its README does. An unlisted failure fails the test, and so does a listed one that
// passes. docs/compatibility.md shows the lists; after a change, run
//
//	go test ./internal/compat -rewrite
//
// The idea of running other projects' suites with a list of known differences is
// from Garnet and from the Web Platform Tests.
package compat
