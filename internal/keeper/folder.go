package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// Errors of OpenFolder. Nothing was changed.
var (
	// ErrFolder means a folder that memory cannot be in, or that others could reach.
	ErrFolder = errors.New("folder cannot hold memory")
	// ErrFolderInUse means that another process has the folder.
	ErrFolderInUse = errors.New("folder is another process's")
)

// ownerLink is a symbolic link to nothing: hugetlbfs has no files with text. It says which process has the folder: pid,
// start time in ticks since the boot, and the inode of its pid namespace.
const ownerLink = "owner"

// Folder holds memory in files of a tmpfs or hugetlbfs, by their names: so it outlives every process, and a container
// too. It does what a Client does, without a keeper. An item is a file, whose name has dots where the item's has
// slashes; other files are left alone.
//
// Files have no seals, so that whoever may write to one could cut it off under those who map it: they are this user's
// alone.
type Folder struct {
	dir  *os.File
	log  *slog.Logger
	path string
}

var itemName = regexp.MustCompile(`^[a-z0-9]+(/[a-z0-9]+)*$`)

// OpenFolder takes the folder at path for this process, whose alone it is until Close; it makes the folder, but not
// those above. pageBytes are those of the memory, 0: normal pages. If the process that had the folder before has not
// ended yet it waits for it.
func OpenFolder(ctx context.Context, path string, pageBytes int, log *slog.Logger) (*Folder, error) {
	if err := unix.Mkdir(path, 0o700); err != nil && err != unix.EEXIST {
		return nil, fmt.Errorf("%w: make %s: %w", ErrFolder, path, err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w (want a folder, and no symbolic link)", ErrFolder, path, err)
	}
	f := &Folder{dir: os.NewFile(uintptr(fd), path), log: log, path: path}
	if err := f.check(pageBytes); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	if err := f.own(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return f, nil
}

func (f *Folder) fd() int { return int(f.dir.Fd()) }

// check refuses a folder of another kind, of other pages, or of others.
func (f *Folder) check(pageBytes int) error {
	var st unix.Stat_t
	var on unix.Statfs_t
	if err := errors.Join(unix.Fstat(f.fd(), &st), unix.Fstatfs(f.fd(), &on)); err != nil {
		return err
	}
	switch {
	case st.Uid != uint32(os.Geteuid()):
		return fmt.Errorf("%w: its owner is user %d, and this process is %d's", ErrFolder, st.Uid, os.Geteuid())
	case st.Mode&0o077 != 0:
		return fmt.Errorf("%w: its mode is %04o, want 0700: others could change the memory", ErrFolder, st.Mode&0o7777)
	case on.Type == unix.TMPFS_MAGIC && pageBytes != 0:
		return fmt.Errorf("%w: it is on a tmpfs, whose pages are normal ones: huge pages of %d bytes want a hugetlbfs",
			ErrFolder, pageBytes)
	case on.Type == unix.TMPFS_MAGIC:
	case on.Type == unix.HUGETLBFS_MAGIC && int64(on.Bsize) != int64(pageBytes):
		return fmt.Errorf("%w: it is on a hugetlbfs with pages of %d bytes, and the memory is to have pages of %d "+
			"(0: normal)", ErrFolder, on.Bsize, pageBytes)
	case on.Type == unix.HUGETLBFS_MAGIC:
	default:
		return fmt.Errorf("%w: it is on a file system of type %#x, want a tmpfs or a hugetlbfs", ErrFolder, on.Type)
	}
	return nil
}

// own locks the folder, and waits for the end of the process that had it before: the kernel lets go of its lock before
// it has taken its queue pairs apart.
func (f *Folder) own(ctx context.Context) error {
	before, err := os.Readlink(f.at(ownerLink))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		before = "" // something else has the name; Remove says what
	}
	if err := unix.Flock(f.fd(), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if err == unix.EWOULDBLOCK {
			return fmt.Errorf("%w (pid, start and pid namespace %q)", ErrFolderInUse, before)
		}
		return fmt.Errorf("lock: %w", err)
	}
	me, err := processNamed(os.Getpid())
	if err != nil {
		return err
	}
	if err := f.ended(ctx, before, me); err != nil {
		return err
	}
	if err := os.Remove(f.at(ownerLink)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Symlink(me, f.at(ownerLink))
}

// ended waits until the process of that name has. Those of another pid namespace cannot be seen, and the one that
// started them, such as a container engine, has waited for them.
func (f *Folder) ended(ctx context.Context, name, me string) error {
	var pid int
	var start, space uint64
	if n, _ := fmt.Sscanf(name, "%d-%d-%d", &pid, &start, &space); n != 3 || name == me ||
		!strings.HasSuffix(me, fmt.Sprintf("-%d", space)) {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH || err == unix.EINVAL { // no such process; no such number, or a thread's
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d, which had the folder: %w", pid, err)
	}
	defer unix.Close(fd)
	if now, err := processNamed(pid); err != nil || now != name {
		return nil // another process has the number, or none any more
	}
	for said := false; ; said = true {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 100)
		switch {
		case err != nil && err != unix.EINTR:
			return err
		case n == 1:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case !said:
			f.log.Warn("the process that had the folder has not ended: waiting for it", "folder", f.path, "pid", pid)
		}
	}
}

// processNamed gives the name of a process: pid, start time, and the inode of this process's pid namespace.
func processNamed(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The second field is a name in parentheses, which may have any; the start time is field 22.
	rest := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(rest) < 20 {
		return "", fmt.Errorf("/proc/%d/stat: %d fields", pid, len(rest))
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return "", fmt.Errorf("/proc/self/ns/pid: %w", err)
	}
	return fmt.Sprintf("%d-%s-%d", pid, rest[19], st.Ino), nil
}

func (f *Folder) at(file string) string {
	// By the descriptor: whatever happens to the path, it is the folder that was checked.
	return fmt.Sprintf("/proc/self/fd/%d/%s", f.fd(), file)
}

func fileOf(item string) (string, error) {
	if !itemName.MatchString(item) || item == ownerLink || len(item) > maxName {
		return "", fmt.Errorf("%w: %q cannot be a file's name", ErrRefused, item)
	}
	return strings.ReplaceAll(item, "/", "."), nil
}

// Create makes the file of an item, empty. Drop removes it.
func (f *Folder) Create(item string) (*os.File, error) {
	name, err := fileOf(item)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Openat(f.fd(), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", filepath.Join(f.path, name), err)
	}
	return os.NewFile(uintptr(fd), filepath.Join(f.path, name)), nil
}

// Put says that an item is its file, which Create made and which the one descriptor is of.
func (f *Folder) Put(item string, meta []byte, fds ...int) error {
	name, err := fileOf(item)
	if err != nil {
		return err
	}
	var there, got unix.Stat_t
	if len(fds) != 1 || len(meta) > 0 {
		return fmt.Errorf("%w: %q: %d descriptors and %d bytes of meta, want one and none", ErrRefused, item, len(fds),
			len(meta))
	}
	if err := errors.Join(unix.Fstatat(f.fd(), name, &there, unix.AT_SYMLINK_NOFOLLOW),
		unix.Fstat(fds[0], &got)); err != nil {
		return fmt.Errorf("%w: %q: %w", ErrRefused, item, err)
	}
	if there.Dev != got.Dev || there.Ino != got.Ino {
		return fmt.Errorf("%w: %q is another file", ErrRefused, item)
	}
	return nil
}

// Drop removes the file of an item. A process that maps it goes on.
func (f *Folder) Drop(item string) error {
	name, err := fileOf(item)
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(f.fd(), name, 0); err != nil {
		return fmt.Errorf("remove %s: %w", filepath.Join(f.path, name), err)
	}
	return nil
}

// Rename gives the file of an item the name of another one that does not exist, and says where it is.
func (f *Folder) Rename(from, to string) (where string, err error) {
	was, err := fileOf(from)
	name, err2 := fileOf(to)
	if err := errors.Join(err, err2); err != nil {
		return "", err
	}
	where = filepath.Join(f.path, name)
	if err := unix.Renameat2(f.fd(), was, f.fd(), name, unix.RENAME_NOREPLACE); err != nil {
		return "", fmt.Errorf("rename %s to %s: %w", filepath.Join(f.path, was), where, err)
	}
	return where, nil
}

// List opens the files. It leaves out, with a line in the log, those that this process cannot have made.
func (f *Folder) List() (items []*Item, err error) {
	entries, err := os.ReadDir(f.at("."))
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", f.path, err)
	}
	for _, e := range entries {
		item := strings.ReplaceAll(e.Name(), ".", "/")
		if e.Name() == ownerLink {
			continue
		}
		i, err := f.open(item, e.Name())
		if err != nil {
			f.log.Warn("a file that is none of a memory node's is left alone", "folder", f.path, "file", e.Name(),
				"err", err)
			continue
		}
		items = append(items, i)
	}
	return items, nil
}

func (f *Folder) open(item, name string) (*Item, error) {
	if want, err := fileOf(item); err != nil || want != name {
		return nil, fmt.Errorf("%w: its name", ErrRefused)
	}
	fd, err := unix.Openat(f.fd(), name, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	i := &Item{Name: item, FDs: []int{fd}, File: true}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err == nil && (st.Mode != unix.S_IFREG|0o600 || st.Uid != uint32(os.Geteuid()) || st.Nlink != 1) {
		err = fmt.Errorf("%w: mode %o, owner %d, %d links; want %o, %d, 1", ErrRefused, st.Mode, st.Uid, st.Nlink,
			unix.S_IFREG|0o600, os.Geteuid())
	}
	if err != nil {
		i.Close()
		return nil, err
	}
	return i, nil
}

// Room gives how many bytes the folder's file system has for files, those that are there included; -1: the machine's
// memory is the bound.
func (f *Folder) Room() (int64, error) {
	var on unix.Statfs_t
	if err := unix.Fstatfs(f.fd(), &on); err != nil {
		return 0, fmt.Errorf("%s: %w", f.path, err)
	}
	if on.Blocks == 0 {
		return -1, nil
	}
	return int64(on.Blocks) * int64(on.Bsize), nil
}

// Close lets go of the folder; what it holds stays.
func (f *Folder) Close() error { return f.dir.Close() }
