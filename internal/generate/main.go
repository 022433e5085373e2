// Command generate makes Go code from .proto files: it compiles them as protoc does, and has protoc-gen-go and
// protoc-gen-go-grpc make the code of each. It makes the table of Redis's commands from their descriptions in
// commands.jsonl. `make generate` runs it at the top of the tree.
//
//	go run ./internal/generate FILE.proto... FILE.jsonl...
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/pluginpb"
)

const module = "github.com/kvd-project/kvd"

// plugins are pinned: they write their versions into what they make.
var plugins = []string{
	"google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
	"google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.0",
}

func main() {
	for _, name := range os.Args[1:] {
		from := generate
		if filepath.Ext(name) == ".jsonl" {
			from = generateCommands
		}
		if err := from(name); err != nil {
			fmt.Fprintf(os.Stderr, "generate: %s: %v\n", name, err)
			os.Exit(1)
		}
	}
}

// roots are the folders below which files are named, also where they import each other; the first that has one counts.
var roots = []string{"internal/dirpb", "."}

// generate makes the code of a file.
func generate(name string) error {
	for _, r := range roots {
		if below, err := filepath.Rel(r, name); err == nil && filepath.IsLocal(below) {
			name = filepath.ToSlash(below)
			break
		}
	}
	c := protocompile.Compiler{SourceInfoMode: protocompile.SourceInfoStandard,
		Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: roots})}
	files, err := c.Compile(context.Background(), name)
	if err != nil {
		return err
	}
	q := &pluginpb.CodeGeneratorRequest{FileToGenerate: []string{name}, Parameter: proto.String("module=" + module)}
	add(q, files[0], make(map[string]bool))
	in, err := proto.Marshal(q)
	if err != nil {
		return err
	}
	for _, p := range plugins {
		if err := run(p, in); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

// add puts a file behind those that it imports.
func add(q *pluginpb.CodeGeneratorRequest, f protoreflect.FileDescriptor, has map[string]bool) {
	if has[f.Path()] {
		return
	}
	has[f.Path()] = true
	for i := range f.Imports().Len() {
		add(q, f.Imports().Get(i).FileDescriptor, has)
	}
	q.ProtoFile = append(q.ProtoFile, protoutil.ProtoFromFileDescriptor(f))
}

// run has a plugin answer a request, and writes the files that it made.
func run(plugin string, in []byte) error {
	var out bytes.Buffer
	cmd := exec.Command("go", "run", plugin)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	var r pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(out.Bytes(), &r); err != nil {
		return err
	}
	if r.Error != nil {
		return errors.New(r.GetError())
	}
	for _, f := range r.GetFile() {
		if !filepath.IsLocal(f.GetName()) {
			return fmt.Errorf("a file is to be at %q", f.GetName())
		}
		if err := os.WriteFile(f.GetName(), []byte(f.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
