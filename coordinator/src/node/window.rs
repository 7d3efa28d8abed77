//! The hours of a day in which containerd may be restarted.

use std::fmt;
use std::str::FromStr;

use jiff::civil::Time;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan as _};

/// From one time of the day to another, every day, in a time zone. One that ends before it begins reaches into the
/// next day.
#[derive(Debug, Clone, PartialEq)]
pub struct Window {
    from: Time,
    to: Time,
    zone: TimeZone,
}

impl Window {
    /// When it is next open: `now` if it is open.
    pub fn next(&self, now: Timestamp) -> Timestamp {
        let local = now.to_zoned(self.zone.clone());
        let time = local.time();
        let open = if self.from <= self.to {
            (self.from..self.to).contains(&time)
        } else {
            time >= self.from || time < self.to
        };
        if open {
            return now;
        }
        // A day has always a first moment from which the time of the day is reached, also when clocks are changed.
        let opening = |days: i64| {
            let day = local.date().checked_add(days.days()).ok()?;
            let zoned = day.to_datetime(self.from).to_zoned(self.zone.clone()).ok()?;
            Some(zoned.timestamp()).filter(|at| *at > now)
        };
        opening(0)
            .or_else(|| opening(1))
            .unwrap_or(now + SignedDuration::from_hours(24))
    }
}

impl FromStr for Window {
    type Err = String;

    /// Reads `22:00-04:00`, in UTC, or `22:00-04:00 Europe/Berlin`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (hours, zone) = match text.trim().split_once(' ') {
            Some((hours, zone)) => (hours, zone.trim()),
            None => (text.trim(), "UTC"),
        };
        let (from, to) = hours
            .split_once('-')
            .ok_or_else(|| format!("{text:?} is not of the form 22:00-04:00"))?;
        let time = |text: &str| -> Result<Time, String> {
            text.trim()
                .parse()
                .map_err(|error| format!("{text:?} is no time of the day: {error}"))
        };
        let window = Self {
            from: time(from)?,
            to: time(to)?,
            zone: TimeZone::get(zone).map_err(|error| format!("{zone:?} is no time zone: {error}"))?,
        };
        if window.from == window.to {
            return Err(format!("{text:?} begins when it ends"));
        }
        Ok(window)
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zone = self.zone.iana_name().unwrap_or("UTC");
        write!(f, "{:.0}-{:.0} {zone}", self.from, self.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().expect("a time")
    }

    fn next(window: &str, now: &str) -> String {
        let window: Window = window.parse().expect("a window");
        window.next(at(now)).to_string()
    }

    #[test]
    fn inside_it_is_open_and_outside_it_opens_next() {
        let day = "09:00-17:00";
        assert_eq!(next(day, "2026-03-01T09:00:00Z"), "2026-03-01T09:00:00Z");
        assert_eq!(next(day, "2026-03-01T16:59:59Z"), "2026-03-01T16:59:59Z");
        assert_eq!(next(day, "2026-03-01T17:00:00Z"), "2026-03-02T09:00:00Z");
        assert_eq!(next(day, "2026-03-01T08:00:00Z"), "2026-03-01T09:00:00Z");
    }

    #[test]
    fn it_may_reach_into_the_next_day() {
        let night = "22:00-04:00";
        assert_eq!(next(night, "2026-03-01T23:00:00Z"), "2026-03-01T23:00:00Z");
        assert_eq!(next(night, "2026-03-02T03:59:00Z"), "2026-03-02T03:59:00Z");
        assert_eq!(next(night, "2026-03-02T04:00:00Z"), "2026-03-02T22:00:00Z");
    }

    #[test]
    fn hours_are_those_of_the_zone_also_when_clocks_are_changed() {
        let berlin = "22:00-04:00 Europe/Berlin";
        assert_eq!(next(berlin, "2026-01-10T12:00:00Z"), "2026-01-10T21:00:00Z");
        assert_eq!(next(berlin, "2026-07-10T12:00:00Z"), "2026-07-10T20:00:00Z");
        // On 2026-03-29 the hour from 2 to 3 is skipped.
        assert_eq!(
            next("02:30-04:00 Europe/Berlin", "2026-03-28T23:30:00Z"),
            "2026-03-29T01:30:00Z"
        );
    }

    #[test]
    fn what_makes_no_window_is_refused_in_words() {
        for (text, word) in [
            ("22:00", "form"),
            ("22:00-25:00", "time of the day"),
            ("22:00-22:00", "begins when it ends"),
            ("22:00-04:00 Mars/Base", "time zone"),
        ] {
            let error = text.parse::<Window>().expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
