package tier

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// volumeFile is the file that says which volume a folder is.
const volumeFile = "VOLUME"

// folderFormat is of volumeFile.
const folderFormat = 1

// folder is what volumeFile holds.
type folder struct {
	Format int
	Folder uint64 // drawn when the folder was made
	Boot   uint64 // of the process that has it
	// Volume and Cluster are the directory's; 0 and empty until it has answered once.
	Volume  uint32
	Cluster string
	// Namespaces are those that the directory has named and whose files may be here, each with the number of recoveries
	// that the directory had seen when it named it last.
	Namespaces map[uint32]uint64

	dir     string
	process uint64 // drawn by this process
}

// namespaceDir is the name of the folder of a namespace's files.
func namespaceDir(id uint32) string { return fmt.Sprintf("namespace-%d", id) }

// namespaceDirs lists namespaces that have files, ascending.
func (f *folder) namespaceDirs() (ids []uint32, err error) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		text, _ := strings.CutPrefix(e.Name(), "namespace-")
		if id, err := strconv.ParseUint(text, 10, 32); err == nil && e.Name() == namespaceDir(uint32(id)) {
			ids = append(ids, uint32(id))
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// lock takes a file that nobody else may have, until it is closed or the process ends.
func lock(path string) (io.Closer, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// openFolder reads what a folder is, or makes it new, and counts this process's boot before anybody hears of it.
func openFolder(dir string) (*folder, error) {
	path := filepath.Join(dir, volumeFile)
	f := &folder{Format: folderFormat, Folder: dirpb.RandomID()}
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read which volume the folder is: %w", err)
	default:
		*f = folder{}
		if err := json.Unmarshal(b, f); err != nil || f.Format == 0 || f.Folder == 0 {
			return nil, fmt.Errorf("%s does not say which volume the folder is; nothing was changed: %w", path,
				errors.Join(err, errors.New("damaged")))
		}
		if f.Format != folderFormat {
			return nil, fmt.Errorf("%s has format %d, and this version knows %d; nothing was changed", path, f.Format,
				folderFormat)
		}
	}
	f.dir, f.process = dir, dirpb.RandomID()
	f.Boot++
	return f, f.write()
}

// write makes the file durable, whole or as it was.
func (f *folder) write() error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err = renameio.WriteFile(filepath.Join(f.dir, volumeFile), append(b, '\n'), 0o600); err == nil {
		err = syncDir(f.dir)
	}
	if err != nil {
		return fmt.Errorf("write which volume the folder is: %w", err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
