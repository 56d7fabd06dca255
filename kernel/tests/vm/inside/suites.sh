# Runs external test suites in a machine with two raw disks, which are overwritten:
#
#     vm/run --kernel=series-6.12 --fs=raw --fs=raw -- sh kernel/tests/vm/inside/suites.sh SUITE FOLDER TEST...
#
# SUITE is blktests, liburing, ltp, mm, ext4 or xfs. mm is tools/testing/selftests/mm of Linux, and the latter two are
# xfstests on these file systems. FOLDER is the source of the suite, already built. TEST is an argument of the suite's
# runner: block/003, test/iopoll.t, "gup_test -a", generic/091; for LTP a program with its arguments:
# "kernel/mem/ksm/ksm01 -u 32". The exit status is 1 if a test fails. The last lines, one per test, can be compared with
# those of other kernels with diff(1).
suite=$1 folder=$2
shift 2
# The tree is read-only in the machine.
out=/tmp/suite
modprobe -q configfs
mount -t configfs config /sys/kernel/config 2>/dev/null
mkdir -p $out/test $out/scratch
cd "$folder" || exit

case $suite in
blktests)
	# So that sudo can resolve it.
	hostname localhost
	printf 'TEST_DEVS=(%s)\nQUICK_RUN=1\nTIMEOUT=20\nNORMAL_USER=nobody\n' "$RAW" >$out/config
	# Some tests truncate the file that is standard output.
	./check --config=$out/config --output=$out/results "$@" 2>&1 | tee $out/log
	sed -n 's/^\([a-z]*\/[0-9]*\) .*\[\(.*\)\]$/\1 \2/p' $out/log >$out/summary
	;;
ext4 | xfs)
	export FSTYP=$suite TEST_DEV=$RAW TEST_DIR=$out/test SCRATCH_DEV=$RAW2 SCRATCH_MNT=$out/scratch
	export RESULT_BASE=$out/results HOST_OPTIONS=/dev/null
	case $suite in
	ext4) mkfs.ext4 -q -F "$RAW" ;;
	xfs) mkfs.xfs -q -f "$RAW" ;;
	esac || exit
	./check "$@" 2>&1
	for test; do
		status=failed
		! grep -qw "^Ran:.*$test" $out/results/check.log || status=passed
		! grep -qw "^Failures:.*$test" $out/results/check.log || status=failed
		! grep -qw "^Not run:.*$test" $out/results/check.log || status='not run'
		echo "$test $status"
	done >$out/summary
	;;
ltp)
	mkfs.ext4 -q -F "$RAW2" && mount "$RAW2" $out/scratch || exit
	# LTP needs a world-writable directory.
	chmod 1777 $out/scratch
	export TMPDIR=$out/scratch LTP_TIMEOUT_MUL=5 LTP_COLORIZE_OUTPUT=n
	for test; do
		echo "$test"
		cd "$folder/testcases/$(dirname "${test%% *}")" || exit
		# Unquoted, to split off the arguments.
		PATH=$PWD:$PATH timeout 400 "$folder"/testcases/$test 2>&1
		# Bits of the status: 1 failed, 2 broken, 4 warned, 32 not supported.
		case $? in
		0) status=passed ;;
		4) status=warned ;;
		32) status='not run' ;;
		*) status=failed ;;
		esac
		echo "$test $status" >>$out/summary
	done
	;;
liburing | mm)
	case $suite in
	liburing) mkfs.ext4 -q -F "$RAW2" && mount "$RAW2" $out/scratch && cd $out/scratch ;;
	mm)
		mkfs.xfs -q -f "$RAW2" && mount "$RAW2" $out/scratch && cd $out/scratch &&
			mkswap "$RAW" >/dev/null && swapon "$RAW" &&
			# The number in run_vmtests.sh.
			echo 128 >/proc/sys/vm/nr_hugepages
		;;
	esac || exit
	for test; do
		echo "$test"
		# Unquoted, to split off the arguments.
		timeout 2400 "$folder"/$test 2>&1
		case $? in
		0) status=passed ;;
		4 | 77) status='not run' ;;
		*) status=failed ;;
		esac
		echo "$test $status" >>$out/summary
	done
	;;
esac
echo
cat $out/summary
! grep -q ' failed$' $out/summary
