# The first process of a pod, in its new namespaces:
#   pod.sh NAME ADDRESS NAMESERVER VOLUME|- ACCOUNT|- CHECKOUT IMAGE_FOLDER... -- COMMAND...
# IMAGE_FOLDERs stay visible in the folders that are otherwise private and empty in a pod.
set -eu
name=$1 address=$2 nameserver=$3 volume=$4 account=$5 checkout=$6
shift 6
hostname "$name"
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/image /mnt/volume
count=0
kept=""
while [ "$1" != -- ]; do
  mkdir "/mnt/image/$count"
  mount --bind "$1" "/mnt/image/$count"
  mount -o remount,bind,ro "/mnt/image/$count"
  kept="$kept $1"
  count=$((count + 1))
  shift
done
shift
if [ "$volume" != - ]; then mount --bind "$volume" /mnt/volume; fi
mkdir /mnt/account
if [ "$account" != - ]; then cp "$account"/* /mnt/account; fi
printf '127.0.0.1 localhost\n%s %s\n' "$address" "$name" > /mnt/hosts
echo "nameserver $nameserver" > /mnt/resolv.conf
mount --bind /mnt/hosts /etc/hosts
mount --bind /mnt/resolv.conf /etc/resolv.conf

for folder in /tmp /var /home /root /run /dev/shm; do
  mount -t tmpfs -o mode=1777 tmpfs "$folder"
done
if [ -d "$checkout" ]; then mount -t tmpfs tmpfs "$checkout"; fi
count=0
for folder in $kept; do
  if [ ! -e "$folder" ]; then
    mkdir -p "$folder"
    mount --bind "/mnt/image/$count" "$folder"
  fi
  count=$((count + 1))
done
mkdir -p /home/nemo /var/nemo_rl
chown 1000:1000 /home/nemo /var/nemo_rl
mkdir -p /var/run/secrets/kubernetes.io/serviceaccount
cp -r /mnt/account/. /var/run/secrets/kubernetes.io/serviceaccount
if [ "$volume" != - ]; then mount --bind /mnt/volume /var/nemo_rl; fi
mount -o remount,bind,ro /
mount -t tmpfs tmpfs /mnt
cd /home/nemo
exec setpriv --pdeathsig KILL --reuid 1000 --regid 1000 --clear-groups --no-new-privs "$@"
