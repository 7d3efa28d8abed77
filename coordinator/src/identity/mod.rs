//! Who is who: the authority that signs, the enrolment of agents, and the mutual TLS to them.
//!
//! What lives here proves identities and knows nothing of what is then said over the connections.

mod authority;
mod current;
mod dial;
mod enrollment;
mod rotation;
mod vault;

pub use authority::{Authority, AuthorityError, Credentials};
pub use current::Current;
pub use dial::{DialError, Dialer};
pub use enrollment::{Arrival, Enroller, node_of_token};
pub use rotation::Lives;
pub use vault::Vault;
