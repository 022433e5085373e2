// Package nativetest runs the tests of libkvd, in client/c, against a store and brokers of real processes. It has only
// tests, which make test-native runs.
package nativetest
