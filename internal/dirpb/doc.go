// Package dirpb is the generated gRPC contract of the directory; read
// directory.proto. It holds no logic and any package may import it.
package dirpb
