// Package lint keeps the rules that the compiler does not. They say which
// package may import which, that each package says what it is for, and which
// words the project uses. It is only a test.
//
// The table in lint_test.go is the map of the project. Data goes client →
// internal/engine → index → internal/layout and client → rdma → rdma/driver. Control
// goes through server and memnode. A refusal names both ends and the reason.
// Somebody who needs an import that is refused either moves code, or changes the row
// and its reason in the same commit.
//
// Words are held to the glossary of docs/protocol.md, whose last column names what is
// not written for a word; see words_test.go. Sentences have at most 25 words, but for
// those of testdata/long-sentences; see sentences_test.go. Forms of words that hide a
// number, a subject or the present are refused, but for those of testdata/phrases; see
// phrases_test.go. Documents begin with what they answer, for whom, and with their
// contents; see pages_test.go. Their links are followed; see links_test.go.
// Links of comments are followed, too, and so are the names with which comments begin, and the headings that they
// quote; see refs_test.go.
//
// Files and functions have lengths that a reader can hold; see shape_test.go. Lines have at most 120 columns; see
// lines_test.go.
//
// The form is Tailscale's depaware and its tests of forbidden imports.
package lint
