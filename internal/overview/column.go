package overview

import (
	"bytes"
	"encoding/json"
	"slices"
)

// Column is one fact of each T, as kvctl's tables, its JSON and the pages of daemons show it.
type Column[T any] struct {
	Head  string         // of a table; empty: scripts alone see it
	Text  func(T) string // for people; - stands for what is not known
	Right bool           // the cells are aligned right, as numbers are in any case
	Name  string         // in JSON; empty: people alone see it
	JSON  func(T) any    // nil is null, and Absent leaves the member out
}

// Absent stands for a member that an object of JSON does not have.
var Absent = new(struct{ absent bool })

// Columns are the facts of each T from left to right. They are not changed once made, so they may be shared.
type Columns[T any] []Column[T]

// Only are the columns with these heads, in their order.
func (c Columns[T]) Only(heads ...string) Columns[T] {
	return slices.DeleteFunc(slices.Clone(c), func(x Column[T]) bool { return !slices.Contains(heads, x.Head) })
}

// Without are the columns that have none of these heads.
func (c Columns[T]) Without(heads ...string) Columns[T] {
	return slices.DeleteFunc(slices.Clone(c), func(x Column[T]) bool { return slices.Contains(heads, x.Head) })
}

// Heads are those of a table.
func (c Columns[T]) Heads() (heads []string) {
	for _, x := range c {
		if x.Head != "" {
			heads = append(heads, x.Head)
		}
	}
	return heads
}

// Texts are the cells of a row of a table.
func (c Columns[T]) Texts(of T) []string {
	cells := make([]string, 0, len(c))
	for _, x := range c {
		if x.Head != "" {
			cells = append(cells, x.Text(of))
		}
	}
	return cells
}

// Object is the JSON object of one T, whose members are in the order of the columns.
func (c Columns[T]) Object(of T) (json.RawMessage, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	b.WriteByte('{')
	for _, x := range c {
		if x.Name == "" {
			continue
		}
		value := x.JSON(of)
		if value == any(Absent) {
			continue
		}
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		for i, v := range []any{x.Name, value} {
			if err := e.Encode(v); err != nil {
				return nil, err
			}
			b.Truncate(b.Len() - 1) // the end of the line
			if i == 0 {
				b.WriteByte(':')
			}
		}
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// Objects are the JSON objects of all.
func (c Columns[T]) Objects(all []T) ([]json.RawMessage, error) {
	objects := make([]json.RawMessage, len(all))
	for i, of := range all {
		o, err := c.Object(of)
		if err != nil {
			return nil, err
		}
		objects[i] = o
	}
	return objects, nil
}
