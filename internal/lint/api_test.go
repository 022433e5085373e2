package lint

import (
	"errors"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// public lists the packages that users' programs are written against.
var public = []string{"client", "client/near", "client/clienttest", "client/prom"}

// A type that a user cannot name is one that he can neither keep nor fake. Tools for the store's own programs
// are in internal/inside.
func TestPublicTypesCanBeNamed(t *testing.T) {
	for _, pkg := range load(t, public...) {
		for _, r := range unnameable(pkg) {
			t.Error(r)
		}
	}
}

// client.API has all that a Client can do, so that fakes and near caches can do it, too.
func TestClientIsItsAPI(t *testing.T) {
	pkg := load(t, "client")[0]
	api := pkg.Scope().Lookup("API").Type().Underlying().(*types.Interface)
	own := []string{"Close", "HotKeys", "Register", "Stats"} // of a session, not of the store
	for m := range types.NewMethodSet(types.NewPointer(pkg.Scope().Lookup("Client").Type())).Methods() {
		name := m.Obj().Name()
		in, _, _ := types.LookupFieldOrMethod(api, false, pkg, name)
		if m.Obj().Exported() && in == nil && !slices.Contains(own, name) {
			t.Errorf("client.Client.%s is not in client.API: add it there, or make it a tool of internal/inside", name)
		}
	}
}

// load reads packages of the project as the compiler has written them down.
func load(t *testing.T, names ...string) (out []*types.Package) {
	t.Helper()
	args := []string{"list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}"}
	for _, n := range names {
		args = append(args, module+"/"+n)
	}
	list, err := exec.Command("go", args...).Output()
	if err != nil {
		if e := (*exec.ExitError)(nil); errors.As(err, &e) {
			err = fmt.Errorf("%w\n%s", err, e.Stderr)
		}
		t.Fatalf("go list: %v", err)
	}
	files := map[string]string{}
	for line := range strings.Lines(string(list)) {
		name, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		files[name] = file
	}
	imp := importer.ForCompiler(token.NewFileSet(), "gc", func(name string) (io.ReadCloser, error) {
		return os.Open(files[name])
	})
	for _, n := range names {
		pkg, err := imp.Import(module + "/" + n)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, pkg)
	}
	return out
}

// unnameable says which exported functions, methods, fields, variables and constants of pkg have types that no other
// module can name.
func unnameable(pkg *types.Package) (out []string) {
	check := func(what string, typ types.Type) {
		if bad := hidden(typ); bad != "" {
			out = append(out, fmt.Sprintf("%s: %s names %s, which a user cannot: give it a type of the package, or "+
				"make it a tool of internal/inside", pkg.Path(), what, bad))
		}
	}
	for _, name := range pkg.Scope().Names() {
		obj := pkg.Scope().Lookup(name)
		if !obj.Exported() {
			continue
		}
		tn, isType := obj.(*types.TypeName)
		if !isType {
			check(name, obj.Type())
			continue
		}
		if tn.IsAlias() {
			continue // a name for what it stands for
		}
		named := tn.Type().(*types.Named)
		for m := range types.NewMethodSet(types.NewPointer(named)).Methods() {
			if m.Obj().Exported() {
				check(name+"."+m.Obj().Name(), m.Obj().Type())
			}
		}
		switch u := named.Underlying().(type) {
		case *types.Struct:
			for f := range u.Fields() {
				if f.Exported() {
					check(name+"."+f.Name(), f.Type())
				}
			}
		case *types.Interface:
			for m := range u.Methods() {
				check(name+"."+m.Name(), m.Type())
			}
		default:
			check(name, u)
		}
	}
	return out
}

// hidden is the first type in typ that no other module can name, or "".
func hidden(typ types.Type) string {
	first := func(list ...types.Type) string {
		for _, x := range list {
			if bad := hidden(x); bad != "" {
				return bad
			}
		}
		return ""
	}
	all := func(n int, at func(int) types.Type) (list []types.Type) {
		for i := range n {
			list = append(list, at(i))
		}
		return list
	}
	type name interface {
		Obj() *types.TypeName
		TypeArgs() *types.TypeList
	}
	switch x := typ.(type) {
	case name: // *types.Named, *types.Alias
		o := x.Obj()
		if o.Pkg() != nil && (!o.Exported() || slices.Contains(strings.Split(o.Pkg().Path(), "/"), "internal")) {
			return o.Pkg().Path() + "." + o.Name()
		}
		return first(all(x.TypeArgs().Len(), x.TypeArgs().At)...)
	case *types.Pointer:
		return hidden(x.Elem())
	case *types.Slice:
		return hidden(x.Elem())
	case *types.Array:
		return hidden(x.Elem())
	case *types.Chan:
		return hidden(x.Elem())
	case *types.Map:
		return first(x.Key(), x.Elem())
	case *types.Signature:
		return first(x.Params(), x.Results())
	case *types.Tuple:
		return first(all(x.Len(), func(i int) types.Type { return x.At(i).Type() })...)
	case *types.Struct:
		return first(all(x.NumFields(), func(i int) types.Type { return x.Field(i).Type() })...)
	case *types.Interface:
		return first(all(x.NumMethods(), func(i int) types.Type { return x.Method(i).Type() })...)
	}
	return ""
}

// A check that refuses nothing would go unnoticed.
func TestUnnameable(t *testing.T) {
	inner := types.NewPackage(module+"/internal/engine", "engine")
	view := types.NewNamed(types.NewTypeName(token.NoPos, inner, "View", nil), types.NewStruct(nil, nil), nil)
	pkg := types.NewPackage(module+"/client", "client")
	tuple := func(typ types.Type) *types.Tuple { return types.NewTuple(types.NewParam(token.NoPos, pkg, "", typ)) }
	kept := types.NewNamed(types.NewTypeName(token.NoPos, pkg, "call", nil), types.NewStruct(nil, nil), nil)
	c := types.NewNamed(types.NewTypeName(token.NoPos, pkg, "Client", nil), types.NewStruct([]*types.Var{
		types.NewField(token.NoPos, pkg, "Calls", types.NewMap(types.Typ[types.Int], kept), false),
		types.NewField(token.NoPos, pkg, "calls", kept, false),
	}, nil), nil)
	pkg.Scope().Insert(c.Obj())
	method := func(name string, result types.Type) {
		recv := types.NewParam(token.NoPos, pkg, "c", types.NewPointer(c))
		c.AddMethod(types.NewFunc(token.NoPos, pkg, name, types.NewSignatureType(recv, nil, nil, nil, tuple(result),
			false)))
	}
	method("View", types.NewPointer(view))
	method("Len", types.Typ[types.Int])
	method("view", types.NewPointer(view))
	got := strings.Join(unnameable(pkg), "\n")
	for _, want := range []string{"Client.View names " + inner.Path() + ".View,", "Client.Calls names " + pkg.Path() +
		".call,"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q\nwant %q", got, want)
		}
	}
	if n := strings.Count(got, "\n") + 1; n != 2 {
		t.Errorf("%d refusals, want 2:\n%s", n, got)
	}
}
