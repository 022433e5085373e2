// Package places is the map from the URL of a destination to its opener. Commands import it; package archive is handed
// what is open.
//
// Start with [Open], which may be called concurrently. The caller owns what it gives.
// The shape is that of package providers.
package places

import (
	"errors"
	"fmt"
	"net/url"
	"os"

	"github.com/kvd-project/kvd/internal/archive"
	"github.com/kvd-project/kvd/internal/archive/s3"
)

// Open opens where a URL says: file:///FOLDER or s3://BUCKET/PREFIX. create makes a folder that is not there. The
// function that it gives closes it. An error does not show the URL, which may have a password by mistake.
func Open(u string, create bool) (archive.Destination, func() error, error) {
	x, err := url.Parse(u)
	if e := (*url.Error)(nil); errors.As(err, &e) {
		return nil, nil, errors.New("no URL: want file:///FOLDER or s3://BUCKET/PREFIX")
	}
	switch x.Scheme {
	case "file":
		return archive.OpenFolder(x, create)
	case "s3":
		return s3.Open(x, os.Getenv)
	}
	return nil, nil, fmt.Errorf("%.20q: want file:///FOLDER or s3://BUCKET/PREFIX", x.Scheme+":")
}
