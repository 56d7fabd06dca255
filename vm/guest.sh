# The guest's first process; it runs as root, in the host's tree, with the arguments MODULES FS...
#
# MODULES is the folder whose lib/modules fits this kernel. $share is where the folder shared with the host is mounted:
# it has `command`, and gets `booted`, `stdout`, `stderr` and `status`, or `broken` if the guest cannot be set up.
# $module is dmafile.ko or empty, $parameters are its parameters, $group is the group that may open its node. $iommu is
# the requested IOMMU, or empty.
modules=$1
shift
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# Mount the tree again, with a cache: Python starts in a third of the time.
plan9() {
	busybox mount -t 9p -o "version=9p2000.L,trans=virtio,access=any,msize=512000,$1" "$2" "$3"
}
plan9 ro,cache=loose virtme.initmount1 /mnt
cd /mnt
busybox pivot_root . mnt
cd /
busybox umount -l /mnt

# Mounts that every program expects; made by busybox, because it starts fastest.
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t debugfs debug /sys/kernel/debug
busybox mount -t tracefs trace /sys/kernel/tracing
busybox mount -t cgroup2 cgroup /sys/fs/cgroup
busybox mount -t devtmpfs dev /dev
busybox mkdir /dev/pts /dev/shm
busybox mount -t devpts -o gid=5,mode=620 pts /dev/pts
busybox mount -t tmpfs -o mode=1777 shm /dev/shm
busybox ln -s /proc/self/fd /dev/fd
busybox ln -s fd/0 /dev/stdin
busybox ln -s fd/1 /dev/stdout
busybox ln -s fd/2 /dev/stderr
busybox mount -t tmpfs -o mode=755 run /run
busybox mkdir "$share"
plan9 rw virtme.initmount0 "$share"
: >"$share/booted"
# Reading from it never returns.
busybox mkfifo /run/never
exec 9<>/run/never

finish() {
	# Power off at once: the disks are unmounted, and nothing else needs an orderly shutdown. The first process must not
	# end, and after this point it must not need anything that is not in memory yet.
	read -r warm </proc/uptime
	echo o >/proc/sysrq-trigger
	read -r warm <&9
}

broken() {
	echo "$*" >"$share/broken"
	finish
}

try() {
	"$@" 2>"$share/error" || broken "\`$*\` failed: $(cat "$share/error")"
}

load() {
	# Errors are ignored: a driver may be built in. If it is missing, its first use fails with a message.
	modprobe -q -a "$@"
}

# The host may have no /lib/modules to mount over. So modprobe, also when the kernel calls it, gets the folder as an
# option.
try mkdir /run/vm
echo '#!/bin/sh' >/run/vm/modprobe
echo "exec /sbin/modprobe -d '$modules' \"\$@\"" >>/run/vm/modprobe
chmod 755 /run/vm/modprobe
echo /run/vm/modprobe >/proc/sys/kernel/modprobe
PATH=/run/vm:$PATH

# Debian's 6.1 has no udmabuf; the heaps are built in.
load udmabuf loop overlay fuse

# /tmp shows the host's files and is writable.
try mkdir -p /run/tmp-upper /run/tmp-work
try chmod 1777 /run/tmp-upper
try mount -t overlay -o lowerdir=/tmp,upperdir=/run/tmp-upper,workdir=/run/tmp-work tmp /tmp

# The host may have no /mnt2, and its tree is read-only. So a second disk needs a new root, in which all folders are
# bind-mounted at their old paths.
if [ $# -gt 1 ] && [ ! -d "/mnt$#" ]; then
	try mount -t tmpfs -o mode=755 root /mnt
	for path in /*; do
		if [ -L "$path" ]; then
			try cp -P "$path" /mnt
		elif [ -d "$path" ] && [ "$path" != /mnt ]; then
			try mkdir "/mnt$path"
			try mount --rbind "$path" "/mnt$path"
		fi
	done
	try mkdir /mnt/mnt
	for number in $(seq 2 $#); do
		try mkdir "/mnt/mnt$number"
	done
	try cd /mnt
	try pivot_root . .
	try umount -l .
	try cd /
fi

[ ! "$iommu" ] || [ "$(ls /sys/class/iommu)" ] || broken "this kernel does not use the IOMMU ($iommu)"

# Finds disk $number, and sets $disk to its node once it has the properties that $fs asks for. The paths of a
# raw-multipath disk are block devices, too, but have no nodes.
appears() {
	disk=
	blocks=$(grep -ls "^disk$number *\$" /sys/block/nvme*/device/serial | cut -d / -f 4)
	for block in $blocks; do
		[ ! -b "/dev/$block" ] || disk=/dev/$block
	done
	[ "$disk" ] || return
	case $fs in
	raw-pi) grep -qs T10-DIF-TYPE1 "/sys/block/${disk#/dev/}/integrity/format" ;;
	raw-zoned) grep -qs host-managed "/sys/block/${disk#/dev/}/queue/zoned" ;;
	raw-multipath) [ "$(echo "$blocks" | wc -l)" -eq 3 ] ;;
	esac
}

await_disk() {
	takes=CONFIG_BLK_DEV_NVME
	case $fs in
	raw-pi) takes=CONFIG_BLK_DEV_INTEGRITY ;;
	raw-zoned) takes=CONFIG_BLK_DEV_ZONED ;;
	raw-multipath) takes=CONFIG_NVME_MULTIPATH ;;
	esac
	# Not every kernel has /proc/config.gz.
	if [ ! -e /proc/config.gz ] || zcat /proc/config.gz | grep -q "^$takes=[ym]"; then
		# Disks appear in any order, on a busy host very late.
		for _ in $(seq 1200); do
			! appears || return
			sleep 0.1
		done
	fi
	broken "no disk $number ($fs): the kernel needs $takes for it"
}

[ $# -eq 0 ] || load nvme
number=0
raws=0
for fs; do
	number=$((number + 1))
	mount=/mnt
	[ $number -eq 1 ] || mount=/mnt$number
	case $fs in
	tmpfs | 9p | virtiofs) ;;
	*) await_disk ;;
	esac
	case $fs in
	raw*)
		raws=$((raws + 1))
		name=RAW
		[ $raws -eq 1 ] || name=RAW$raws
		export "$name=$disk"
		try chmod 666 "$disk"
		continue
		;;
	tmpfs)
		try mount -t tmpfs none $mount
		;;
	9p)
		try plan9 rw disk$number $mount
		;;
	virtiofs)
		load virtiofs
		try mount -t virtiofs disk$number $mount
		;;
	overlayfs)
		load ext4
		try mkdir -p /run/overlay$number
		try mount -t ext4 "$disk" /run/overlay$number
		try mkdir /run/overlay$number/lower /run/overlay$number/upper /run/overlay$number/work
		(cd /run/overlay$number && try mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none $mount)
		;;
	*)
		load "$fs"
		try mount -t "$fs" "$disk" $mount
		;;
	esac
	try chmod 1777 $mount
done

if [ "$module" ]; then
	# Unquoted: $parameters is several words.
	try insmod "$module" $parameters
	# The kernel only warns about unknown parameters.
	for word in $parameters; do
		name=${word%%=*}
		[ -e "/sys/module/dmafile/parameters/$name" ] || broken "dmafile.ko has no parameter \`$name\`"
	done
	try chgrp "$group" /dev/dmafile
fi

echo "<4>vm: COMMAND starts" >/dev/kmsg
# In a subshell with standard error discarded: the shell would print there which signal ended the command.
(exec sh "$share/command" >"$share/stdout" 2>"$share/stderr" </dev/null 9>&-) 2>/dev/null
status=$?

# The module stays if it is still in use, perhaps by a background process of COMMAND.
[ ! "$module" ] || rmmod dmafile 2>/dev/null

# Errors that the kernel reports on unmounting count, too. A mount that is still in use may stay.
for mount in $(awk '$2 ~ "^/mnt[0-9]*$" { print $2 }' /proc/mounts); do
	umount "$mount" 2>/dev/null
done
# kmemleak only reports objects older than 5 seconds that have not changed between two scans.
leaks=/sys/kernel/debug/kmemleak
if [ -e $leaks ]; then
	sleep 6
	echo scan >$leaks
	echo scan >$leaks
	cat $leaks >"$share/leaks"
	if [ -s "$share/leaks" ]; then
		# kmemleak logs the count itself, but at a level below warnings.
		echo "<4>kmemleak: new suspected memory leaks:" >/dev/kmsg
		head -n 200 "$share/leaks" | while IFS= read -r line; do
			echo "<4>$line" >/dev/kmsg
		done
	fi
fi

echo $status >"$share/status.partial"
mv "$share/status.partial" "$share/status"
finish
