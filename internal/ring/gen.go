package ring

//go:generate go test -run TestHeader -rewrite .
